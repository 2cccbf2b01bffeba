"""The benchmark of stacked runs, at a size that says nothing about speed."""

import json

import pytest

from experiments.benchmarks import stacked

TINY = {
    "data.vocab_size": 300,
    "data.seq_len": 8,
    "model.d_model": 8,
    "model.n_layers": 1,
    "model.n_heads": 2,
    "train.batch_size": 2,
    "train.micro_batches": 1,
    "train.steps": 20,
}


def run(path, *arguments):
    options = [f"--config.{key}={value}" for key, value in TINY.items()]
    return stacked.main(["--runs=3", "--rounds=2", f"--output={path}", *options, *arguments])


@pytest.mark.slow
def test_a_stack_makes_the_updates_of_its_runs_and_is_timed_against_one(tmp_path, capsys):
    assert run(tmp_path / "deep" / "found.json") == 0
    found = json.loads((tmp_path / "deep" / "found.json").read_text())
    assert (found["head"], found["batch"], found["rounds"]) == ("tied", [2, 8], 2)
    alone, three = found["contestants"]["alone"], found["contestants"]["stacked"]
    assert (alone["runs"], three["runs"]) == (1, 3)
    assert alone["over_alone"] == [1, 1, 1]
    for values in (alone["ms"], three["ms"], three["over_alone"]):
        assert 0 < values[0] <= values[1] <= values[2]
    # one warm-up round and two counted ones: the third loss, after two updates of a rate of at most 2e-3
    assert alone["loss"] == pytest.approx(three["loss"], rel=1e-4)
    assert alone["loss"] != pytest.approx(5.7038, abs=1e-4)  # ln 300, which no update has touched
    assert "stacked" in capsys.readouterr().out


def test_what_cannot_be_stacked_is_not_timed(tmp_path, capsys):
    assert run(tmp_path / "found.json", "--config.head.name=adaptive") == 2
    assert "cannot be stacked" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "found.json").exists()
