"""Runs and folders are opened alike, by functions and by commands."""

import json

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

from headlab import cli, models, runs
from headlab.cli.commands import export
from headlab.config import replace
from headlab.data import Tokenizer
from headlab.errors import UsageError
from headlab.pretrained import layouts, opening, save_pretrained
from headlab.scoring import generate_text, open_model, score

TEXT = "a bc é\n日本"


@pytest.fixture
def run(decoder, byte_tokenizer, monkeypatch):
    """A run's model after late untying, without its files."""
    config, model = decoder("untied", position="rotary", activation="swiglu")
    config = replace(config, {"head.name": "tied", "head.untie_at": 0.5})
    restored = runs.Restored(model, "untied", byte_tokenizer, config, 7)
    monkeypatch.setattr(opening, "restore_model", lambda run, step, shards: restored)
    return model


def test_a_run_is_opened_with_a_config_of_the_head_that_it_has(run, byte_tokenizer):
    model, tokenizer, config = open_model("r")
    assert model is run and tokenizer is byte_tokenizer
    assert (config.head.name, config.head.untie_at) == ("untied", None)
    assert models.split(models.build(config, 259))[0] == models.split(model)[0]


def test_a_folder_has_no_checkpoints(saved):
    assert open_model(saved / "llama").config.head.name == "untied"
    with pytest.raises(UsageError, match="leave step 'best' out"):
        open_model(saved / "llama", "best")


@pytest.mark.parametrize("text", [None, "{", "[]", '{"vocab_size": 3}'])
def test_what_is_neither_is_refused_as_no_run(text, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=r"is not a run|recorded configuration"):
        open_model(tmp_path)


def test_a_run_is_exported_and_scores_the_same(run, byte_tokenizer, tmp_path, capsys):
    folder, text = str(tmp_path / "out"), tmp_path / "text.txt"
    text.write_text(TEXT)
    assert cli.main(["export", "--workdir=r", folder]) == 0
    assert "in the layout of llama" in capsys.readouterr().out
    assert cli.main(["score", f"--workdir={folder}", str(text), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    [expected] = score(run, [byte_tokenizer.encode(TEXT)], prefix=[258])
    assert [token["log_prob"] for token in found["scores"]] == [
        token.log_prob for token in expected
    ]
    assert (found["step"], found["head"]) == (None, "untied")

    assert cli.main(["generate", f"--workdir={folder}", "a", "--seed=3"]) == 0
    [[told]] = generate_text(run, byte_tokenizer, ["a"], max_new_tokens=14, seed=3)
    assert capsys.readouterr().out == f"a{told.text}\n"

    # a folder is exported like a run
    assert cli.main(["export", f"--workdir={folder}", str(tmp_path / "again")]) == 0
    one, other = (load_file(tmp_path / f / "model.safetensors") for f in ("out", "again"))
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_a_document_begins_with_the_token_that_the_folder_says(decoder, tmp_path, capsys):
    pieces = {chr(97 + i): i for i in range(8)} | {"</s>": 8, "<s>": 9}
    definition = tokenizers.Tokenizer(tokenizers.models.BPE(pieces, []))
    definition.add_special_tokens(["</s>", "<s>"])
    tokenizer = Tokenizer(definition.to_str(), start_id=9)
    config, model = decoder(vocabulary=10, position="rotary", activation="swiglu")
    save_pretrained(tmp_path / "m", model, config, tokenizer)
    described = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (described["bos_token_id"], described["eos_token_id"]) == (9, 8)
    (tmp_path / "text.txt").write_text("abcabh")
    command = ["score", f"--workdir={tmp_path / 'm'}", str(tmp_path / "text.txt"), "--json"]
    assert cli.main(command) == 0
    found = [t["log_prob"] for t in json.loads(capsys.readouterr().out)["scores"]]
    [after_start] = score(model, [[0, 1, 2, 0, 1, 7]], prefix=[9])
    [after_end] = score(model, [[0, 1, 2, 0, 1, 7]], prefix=[8])
    assert found == [token.log_prob for token in after_start]
    assert found != [token.log_prob for token in after_end]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layout=gpt2"], "GPT2LMHeadModel has no place for model.position='rotary'"),
        (["--step=latest"], "--step is 'latest'; it must be last, best or the step"),
    ],
)
def test_an_export_that_cannot_be_is_refused(arguments, said, run, tmp_path, capsys):
    assert cli.main(["export", "--workdir=r", str(tmp_path / "out"), *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_the_command_knows_the_layouts():
    assert tuple(layouts.LAYOUTS) == export.LAYOUTS


def test_the_rank_of_a_folder_is_that_of_its_head_on_a_text(saved, small_corpus, tmp_path, capsys):
    command = ["rank", f"--workdir={saved / 'llama'}", "--contexts=300", "--json"]
    assert cli.main([*command, f"--corpus={small_corpus}", f"--output={tmp_path / 'rank'}"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (
        record["rank"]["rank"] == record["theory"]["bound"] == 17
    )  # d_model 16 and the normaliser
    assert (record["step"], record["head"], record["contexts"]) == (None, "untied", 300)


def test_a_run_has_a_corpus_of_its_own(run, tmp_path, capsys):
    assert cli.main(["rank", f"--workdir={tmp_path}", "--corpus=text:x"]) == 2
    assert "has a corpus of its own" in " ".join(capsys.readouterr().err.split())
