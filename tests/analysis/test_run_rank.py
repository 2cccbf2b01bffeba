"""The rank of a run: states are the model's at held-out positions; `headlab rank` prints and writes what holds."""

import json

import numpy as np
import pytest

from headlab import cli
from headlab.analysis.matrices import log_prob_matrix
from headlab.analysis.states import held_out_states
from headlab.errors import UsageError
from headlab.runs import RunDirectory, dataset_of


@pytest.fixture(scope="module")
def states(tiny_run):
    return held_out_states(tiny_run, 40)


def test_states_are_those_of_the_model_at_the_first_targets(tiny_run, states):
    model, run = states.restored.model, RunDirectory(tiny_run)
    tokens = np.asarray(dataset_of(run, states.restored).store.tokens("validation")[:41], np.int32)
    assert np.array_equal(states.targets, tokens[1:]) and np.array_equal(states.inputs, tokens[:-1])
    second = np.asarray(model(tokens[None, 16:32]))[0]
    np.testing.assert_allclose(states.h[16:32], second, rtol=0, atol=1e-5)
    assert len(states.h) == 40


def test_the_rows_of_a_run_are_its_heads_log_probabilities(tiny_run, states):
    matrix = log_prob_matrix(tiny_run, 40)
    wide = states.h.astype(np.float64) @ np.asarray(states.restored.model.head.weight[...][:300]).T
    wanted = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(np.concatenate(list(matrix)), wanted, rtol=0, atol=1e-12)


def test_the_command_prints_the_theorem_and_writes_what_it_measured(tiny_run, tmp_path, capsys):
    command = ["rank", f"--workdir={tiny_run}", "--contexts=350"]
    assert cli.main([*command, f"--output={tmp_path / 'new'}"]) == 0
    shown = capsys.readouterr()
    for text in ("untied head at step 4", "theorem: at most", "d_model = 8", "350 positions"):
        assert text in " ".join(shown.out.split())
    record = json.loads((tmp_path / "new" / "rank.json").read_text())
    assert record["theory"]["bound"] == 9 == record["rank"]["rank"]
    assert record["rank"]["hidden_size"] == 8 and not record["rank"]["at_least"]
    assert (record["step"], record["contexts"], record["split"]) == (4, 350, "validation")
    assert len(record["singular_values"]) == 300 and record["environment"]["versions"]["jax"]
    assert (tmp_path / "new" / "spectrum.png").read_bytes().startswith(b"\x89PNG")

    assert cli.main([*command, "--step=2", "--sketch=20", "--json", f"--output={tmp_path}"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["step"] == 2 and printed["rank"]["rank"] == 9 and printed["rank"]["sketch"] == 20
    assert "certified" in printed["rank"]["caveats"][0]
    assert printed == json.loads((tmp_path / "rank.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--contexts=1000000"], "the validation split of"),
        (["--step=3"], "has no checkpoint 3"),
        (["--step=latest"], "last, best or the step"),
        (["--sketch=301"], "must be in 1 … 300"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_exit_code_2(tiny_run, capsys, arguments, said):
    assert cli.main(["rank", f"--workdir={tiny_run}", *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_splits_and_counts_have_a_range(tiny_run):
    with pytest.raises(UsageError, match="split is 'all'"):
        held_out_states(tiny_run, 4, split="all")
    with pytest.raises(UsageError, match="contexts is 0"):
        held_out_states(tiny_run, 0)
    with pytest.raises(UsageError, match="a run has its own"):
        log_prob_matrix(tiny_run, 4, embedding=object())
