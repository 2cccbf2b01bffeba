"""The known-truth experiment: what it measures, and that it goes on where it was stopped."""

import json

import numpy as np
import pytest

from experiments.softmax_bottleneck import run
from experiments.softmax_bottleneck.known_truth import OPTIONS, Truth, _build, log_probabilities
from headlab import heads


def test_a_linear_head_fits_at_the_rank_and_fits_are_kept(tmp_path, capsys):
    command = [
        "--quick",
        "--heads=untied",
        "--rank=4",
        "--vocab=12",
        "--restarts=2",
        "--iterations=400",
        f"--workdir={tmp_path}",
    ]
    assert run.main(command) == 0
    shown = capsys.readouterr()
    assert "rank 4" in " ".join(shown.out.split()) and "4 of 4: untied, width 6" in shown.err
    found = json.loads((tmp_path / "known_truth.json").read_text())
    excess = {fit["width"]: fit["excess"] for fit in found["fits"]}
    assert found["centred_rank"] == 4 and found["truth"]["scale"] == 2.0
    assert excess[4] < 1e-3 and excess[6] < 1e-3 and excess[3] > 0.02 and excess[2] > excess[3]
    assert (tmp_path / "known_truth.png").read_bytes().startswith(b"\x89PNG")
    assert run.main(command) == 0
    assert "untied" not in capsys.readouterr().err  # nothing was fitted again
    assert json.loads((tmp_path / "known_truth.json").read_text())["fits"] == found["fits"]


def test_every_registered_head_can_be_fitted_at_the_least_width():
    assert set(OPTIONS) <= set(heads.names())
    for name in heads.names():
        head, _ = _build(name, 12, 2, 0)  # the narrowest
        assert (head.vocab_size, head.d_model) == (12, 2)


def test_the_truth_is_normalised_and_reproducible():
    log_p = log_probabilities(Truth())
    assert abs(1 - np.exp(log_p).sum(axis=1)).max() < 1e-12
    assert (log_p == log_probabilities(Truth())).all() and (
        log_p != log_probabilities(Truth(seed=1))
    ).any()


@pytest.mark.parametrize(
    ("argument", "said"),
    [("--rank=2", "--rank is 2"), ("--rank=32", "3 … 31"), ("--heads=untide", "'untied'")],
)
def test_what_cannot_be_fitted_is_refused(argument, said, capsys):
    assert run.main([argument]) == 2
    assert said in capsys.readouterr().err
