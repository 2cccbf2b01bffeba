"""`headlab cost`: what it prints is what the functions give."""

import json

import pytest

from headlab import cli
from headlab.costs import PRESETS, Setting, chip, model_cost, preset


def test_json_holds_every_figure(capsys):
    arguments = [
        "--model=gemma-2-2b",
        "--chip=h100",
        "--tokens=8192",
        "--shards=8",
        "--dtype=float32",
    ]
    assert cli.main(["cost", *arguments, "--json"]) == 0
    setting = Setting(context=8192, itemsize=4, shards=8)
    expected = model_cost(preset("gemma-2-2b"), setting, chip("h100")).to_dict()
    assert json.loads(capsys.readouterr().out) == [expected]


def test_a_config_is_costed_with_its_overrides(capsys):
    command = ["cost", "--config=configs/tiny.py", "--config.head.name=untied", "--json"]
    assert cli.main(command) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert found["parameters"]["head"] == 512 * 32
    assert found["setting"]["context"] == 32  # it has positions for no more


def test_every_model_is_a_row(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["cost", "--all", "--chip=h100"]) == 0
    shown = capsys.readouterr().out
    assert all(model.name in shown for model in PRESETS.values())
    assert "9.26" in shown and "7.58" in shown


def test_two_models_are_compared_with_and_without_their_heads(capsys):
    assert cli.main(["cost", "--model=gemma-2-2b", "--against=llama-2-7b", "--json"]) == 0
    gemma, llama = json.loads(capsys.readouterr().out)
    assert cli.main(["cost", "--model=gemma-2-2b", "--against=llama-2-7b"]) == 0
    shown = " ".join(capsys.readouterr().out.split())

    def read(cost, *parts):
        return sum(cost[f"{part}_bytes"] for part in parts)

    whole = read(llama, "head", "body", "kv") / read(gemma, "head", "body", "kv")
    assert f"bytes of a decode step, ratio {whole:.2f}" in shown
    body = read(llama, "body", "kv") / read(gemma, "body", "kv")
    assert f"without either head {body:.2f}" in shown


def test_the_table_has_the_least_time_of_a_decode_step_and_a_shards_share(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    arguments = ["--model=llama-2-7b", "--tokens=2048", "--batch=4", "--shards=8"]
    assert cli.main(["cost", *arguments, "--chip=h100"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    # every parameter but the input table once, in bfloat16, and 32 layers' keys and values of 4 sequences
    read = 2 * (6_738_415_616 - 32_000 * 4096) + 4 * 2048 * 32 * (2 * 32 * 128) * 2
    assert f"decode step on NVIDIA H100 SXM, at least {read / 3.35e12 * 1e3:.3f} ms" in shown
    assert f"tokens a second, at most {4 / (read / 3.35e12):,.0f}" in shown
    assert "rows of one of 8 shards 4,000" in shown
    assert "bytes of the head 32.8MB" in shown  # 4000 · 4096 · 2
    assert "does not fit" not in shown
    assert cli.main(["cost", "--model=llama-2-7b", "--batch=64", "--chip=l4"]) == 0
    assert "does not fit in NVIDIA L4" in " ".join(capsys.readouterr().out.split())


def test_two_models_are_compared_by_the_time_of_a_step_on_a_chip(capsys):
    command = ["cost", "--model=smollm2-135m", "--against=smollm2-360m", "--chip=a100"]
    assert cli.main([*command, "--json"]) == 0
    one, other = (cost["decode"] for cost in json.loads(capsys.readouterr().out))
    assert cli.main(command) == 0
    shown = " ".join(capsys.readouterr().out.split())
    whole = (other["head_seconds"] + other["body_seconds"]) / (
        one["head_seconds"] + one["body_seconds"]
    )
    assert f"least time of a decode step, ratio {whole:.2f}" in shown
    assert f"without either head {other['body_seconds'] / one['body_seconds']:.2f}" in shown


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file or directory"),
        ("{", "is damaged"),
        ("[]", "model_type is None; headlab knows"),
        ('{"model_type": "llama"}', "num_attention_heads is missing"),
    ],
)
def test_a_folder_that_cannot_be_read_is_refused_by_name(content, said, tmp_path, capsys):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    folder = tmp_path if content is not None else tmp_path / "none"
    assert cli.main(["cost", f"--hf={folder}"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert said in message and str(folder) in message


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "one of the arguments"),
        (["--model=gemma"], "did you mean gemma-2-2b"),
        (["--model=gpt2", "--chip=h10"], "did you mean h100"),
        (["--model=gpt2", "--tokens=2000"], "GPT-2 has positions for 1024 tokens"),
        (["--model=gpt2", "--config.seed=1"], "give one with --config=FILE"),
        (["--model=gpt2", "--shards=0"], "'0' is not an integer of at least 1"),
    ],
)
def test_what_cannot_be_is_refused(arguments, said, capsys):
    assert cli.main(["cost", *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
