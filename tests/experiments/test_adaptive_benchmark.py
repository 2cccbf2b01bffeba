"""The benchmark of the adaptive softmax compares like with like and records what it measured."""

import importlib.util
import json
import sys

import jax
import pytest

from experiments.benchmarks import adaptive as benchmark
from headlab.errors import HeadlabError

TINY = dict(tokens=12, d_model=16, vocab_size=300, cutoffs=(20, 100), rounds=1)


def test_the_command_writes_a_table_and_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "python_with_torch", lambda given: None)
    output = tmp_path / "deep" / "out.json"
    sizes = ["--tokens=12", "--d-model=16", "--vocab-size=300", "--rounds=2"]
    assert benchmark.main([*sizes, "--cutoffs", "20", "100", f"--output={output}"]) == 0
    out = capsys.readouterr().out
    assert benchmark.OURS in out and benchmark.FULL in out and "PyTorch is left out" in out
    recorded = json.loads(output.read_text())
    assert recorded["cutoffs"] == [20, 100]
    assert sum(recorded["tokens_by_band"]) == 12 * benchmark.BATCHES
    assert set(recorded["contestants"]) == {benchmark.OURS, benchmark.FULL}
    assert recorded["contestants"][benchmark.OURS]["over_headlab"] == [1, 1, 1]
    assert recorded["environment"]["versions"]["jax"] == jax.__version__


@pytest.mark.parametrize(
    ("argument", "said"),
    [("--rounds=0", "'0' is not an integer"), ("--torch-python=/nowhere", "cannot be run")],
)
def test_what_cannot_be_measured_is_refused(argument, said, capsys):
    assert benchmark.main([argument]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


if importlib.util.find_spec("torch"):

    @pytest.mark.peers
    def test_pytorch_computes_the_same_and_says_when_it_does_not(monkeypatch):
        found = benchmark.benchmark(**TINY, torch_python=sys.executable)
        assert set(found["contestants"]) == {benchmark.OURS, benchmark.FULL, benchmark.THEIRS}
        arrays = benchmark._arrays
        monkeypatch.setattr(
            benchmark, "_arrays", lambda head: {k: 1.1 * a for k, a in arrays(head).items()}
        )
        with pytest.raises(HeadlabError, match="ended with code 1"):
            benchmark.benchmark(**TINY, torch_python=sys.executable)
