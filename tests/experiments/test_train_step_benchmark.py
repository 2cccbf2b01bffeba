"""The benchmark compares like with like: the same model, parameters and batches."""

import importlib.util
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.benchmarks import train_step as benchmark
from headlab.config import load
from headlab.errors import HeadlabError

TINY = [
    ("data.vocab_size", "300"),
    ("data.seq_len", "8"),
    ("model.d_model", "8"),
    ("model.n_layers", "2"),
    ("model.n_heads", "2"),
    ("train.batch_size", "3"),
    ("train.micro_batches", "1"),
    ("train.steps", "100"),
]


def config(*overrides):
    return load(Path(benchmark.ROOT) / "configs" / "micro.py", [*TINY, *overrides])


@pytest.mark.slow
@pytest.mark.parametrize("head", ["tied", "untied"])
def test_both_steps_compute_the_same_updates(head):
    found = benchmark.benchmark(config(("head.name", head)), rounds=2)
    losses = [found["contestants"][name]["last_loss"] for name in ("headlab", "naive")]
    # Adam divides by the gradient's own size, so that rounding of a gradient near 0 may turn an update: up to
    # 2·rate in a parameter. The rates of nine warm-up steps (a twentieth of 100 is 5) sum to 9·2e-3 at most.
    assert abs(losses[0] - losses[1]) < 1e-3
    assert found["contestants"]["naive"]["speed"] == [1, 1, 1]
    assert found["batch"] == [3, 8]


def test_contestants_that_compute_different_things_are_not_compared():
    def turn(loss):
        return lambda numbers: ([0.1] * len(numbers), loss)

    with pytest.raises(HeadlabError, match=r"loss of headlab is 5\.000200 .* naive 5\.000000"):
        benchmark._take_turns({"headlab": turn(5.0002), "naive": turn(5.0)}, 1)
    with pytest.raises(HeadlabError, match="loss of headlab is nan"):
        benchmark._take_turns({"headlab": turn(float("nan")), "naive": turn(5.0)}, 1)


def test_all_make_the_same_steps_and_nobody_always_comes_first():
    calls = []

    def turn(name):
        def record(numbers):
            calls.append((name, list(numbers)))
            return [1e-3 * (2 if name == "naive" else 1)] * len(numbers), 5.0

        return record

    turns = benchmark._take_turns({"headlab": turn("headlab"), "naive": turn("naive")}, 2)
    made = {name: [step for who, steps in calls if who == name for step in steps] for name in turns}
    assert made["headlab"] == made["naive"] == list(range(1 + 3 * benchmark.STEPS_A_TURN))
    assert [name for name, _ in calls[-4:]] == ["headlab", "naive", "naive", "headlab"]
    summary = benchmark._summarised(turns, tokens=100)
    assert summary["headlab"]["speed"] == pytest.approx([2, 2, 2])
    assert summary["headlab"]["ms"] == pytest.approx([1, 1, 1])
    assert summary["naive"]["tokens_per_second"] == pytest.approx(50_000)


@pytest.mark.slow
def test_the_command_writes_a_table_and_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "python_with_torch", lambda given: None)
    options = [f"--config.{key}={value}" for key, value in TINY if key != "train.batch_size"]
    output = tmp_path / "deep" / "out.json"
    arguments = ["--head=tied", "--batch=2", "--rounds=1", f"--output={output}", *options]
    assert benchmark.main(arguments) == 0
    out = capsys.readouterr().out
    assert "headlab" in out and "naive" in out
    assert "PyTorch is left out" in out
    recorded = json.loads(output.read_text())["tied"]
    assert recorded["batch"] == [2, 8]
    assert recorded["environment"]["versions"]["jax"] == jax.__version__


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config.model.norm=layer"], "model.norm is 'layer'; the naive step has 'rms' only"),
        (["--config.head.softcap=30"], "head.softcap is 30.0"),
        (["--rounds=0"], "'0' is not an integer"),
        (["--torch-python=/nowhere/python"], "/nowhere/python cannot be run"),
        (["--torch-python=" + sys.executable + "x"], "cannot be run"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments, said, capsys):
    assert benchmark.main(arguments) == 2
    assert said in " ".join(capsys.readouterr().err.split())


if importlib.util.find_spec("torch"):

    @pytest.mark.peers
    @pytest.mark.parametrize("head", ["tied", "untied"])
    def test_pytorch_computes_the_same_updates(head):
        found = benchmark.benchmark(config(("head.name", head)), 1, torch_python=sys.executable)
        losses = [entry["last_loss"] for entry in found["contestants"].values()]
        assert len(losses) == 3
        assert np.ptp(losses) < 1e-3
