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
