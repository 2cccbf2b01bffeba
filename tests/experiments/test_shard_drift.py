"""The drift experiment: what it measures, and that it goes on where it was stopped."""

import json

import pytest

from experiments.shard_drift import run as drift

# What is trained and what is timed as a whole are then one model, whose steps are compiled once.
SMALL = [
    "--config.train.batch_size=4",
    "--config.data.vocab_size=300",
    "--config.model.n_layers=1",
    "--config.model.d_model=16",
    "--config.model.n_heads=2",
    "--config.data.seq_len=16",
    "--config.head.vocab_multiple=8",
    "--config.log.progress=false",
]


@pytest.mark.optimised
@pytest.mark.slow
def test_the_invariant_order_keeps_every_bit_and_what_was_trained_is_kept(tmp_path, capsys):
    command = [
        "--steps=3",
        "--rounds=1",
        "--shards=1",
        "--shards=2",
        f"--workdir={tmp_path}",
        *SMALL,
    ]
    assert drift.main(command) == 0
    shown = capsys.readouterr().out
    assert "3 steps, against one shard" in shown
    found = json.loads((tmp_path / "drift.json").read_text())
    rows = {(row["order"], row["shards"]): row for row in found["drift"]}
    assert rows["invariant", 2]["same_bits"] and rows["invariant", 2]["log_probs"] == 0
    assert rows["invariant", 1]["digest"] == rows["invariant", 2]["digest"]
    # Rounding alone: three steps at a rate of 1e-3 or so don't carry it further.
    assert 0 <= rows["fast", 2]["log_probs"] < 1e-4
    assert set(found["time"]) == set(found["whole_time"]) == {"1", "2"}
    files = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.npz")}
    assert drift.main(command) == 0
    assert files == {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.npz")}
    again = json.loads((tmp_path / "drift.json").read_text())
    assert again["drift"] == found["drift"]


@pytest.mark.parametrize("key", ["head.sum_order=fast", "mesh.vocab=2", "train.steps=5"])
def test_what_the_experiment_sets_is_not_an_option(key, capsys):
    assert drift.main([f"--config.{key}"]) == 2
    assert "set by the experiment" in capsys.readouterr().err
