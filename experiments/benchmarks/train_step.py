"""Times one training step: headlab's own, a naive Flax/Optax one and, where torch is, PyTorch's.

    python -m experiments.benchmarks.train_step
    python -m experiments.benchmarks.train_step --head=tied --rounds=40 --torch-python=PATH

All train the same model from the same parameters on the same batches. They take turns of a few
steps in one run, so that whatever else the machine does falls on all of them alike.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.naive_step import NaiveStep
from experiments.benchmarks.turns import command_line, write
from headlab import cli, sharding
from headlab.config import load
from headlab.errors import HeadlabError, UsageError
from headlab.runs import environment
from headlab.training.optimizer import paths, schedule
from headlab.training.step import make_phase, state_specs, train_step

ROOT = Path(__file__).parents[2]
BATCHES = 8  # distinct ones, used in turn
STEPS_A_TURN = 3
LOSS_TOLERANCE = 1e-4  # nats a token, at equal parameters

# what the naive and the PyTorch model can be; other configurations would compare different things
_COMPARABLE = {
    "model.position": "learned",
    "model.norm": "rms",
    "model.activation": "gelu",
    "model.d_head": None,
    "model.norm_eps": 1e-6,
    "model.bias": False,
    "model.qkv_bias": False,
    "model.output_bias": False,
    "model.mlp_bias": False,
    "model.dropout": 0.0,
    "head.bias": False,
    "head.softcap": None,
    "head.logit_scale": 1.0,
    "head.untie_at": None,
    "train.z_loss_weight": 0.0,
    "train.label_smoothing": 0.0,
    "train.compute_dtype": "float32",
}

Contestant = Callable[[Sequence[int]], tuple[list[float], float]]
"""Makes the updates of these numbers; their seconds, and the loss before the last of them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark from a command line; the exit code is that of `headlab`."""
    return cli.guarded(_run, argv)


def _run(arguments: list[str]) -> int:
    arguments, overrides = cli.split_overrides(arguments)
    options = _parser().parse_args(arguments)
    torch_python = python_with_torch(options.torch_python)
    names = ("tied", "untied") if options.head == "both" else (options.head,)
    results = {}
    for name in names:
        sizes = [
            ("train.batch_size", str(options.batch)),
            ("train.micro_batches", str(_pieces(options.config, options.batch))),
        ]
        chosen = [*sizes, *overrides, ("head.name", name)]
        results[name] = benchmark(load(options.config, chosen), options.rounds, torch_python)
        _print_table(name, results[name])
    if torch_python is None:
        print(
            "PyTorch is left out: this Python has no torch. Install the extra `peers`, or name a "
            "Python that has it by --torch-python=PATH."
        )
    write(results, options.output)
    return 0


def benchmark(config: Any, rounds: int, torch_python: str | None = None) -> dict[str, Any]:
    """Times the step of a resolved config; what the contestants did, by name.

    Returns:
      contestants: {name: {"ms": [first quartile, median, third quartile] of all steps,
        "tokens_per_second" at the median, "speed" against naive: the quartiles of the ratio of the
        two medians in each round, "last_loss"}}, and the batch, machine and versions.

    Raises:
      UsageError: a config that the naive step cannot match.
      HeadlabError: the contestants' losses differ at equal parameters.
    """
    for key, value in _COMPARABLE.items():
        section, name = key.split(".")
        if config[section].get(name, value) != value:
            raise UsageError(
                f"{key} is {config[section][name]!r}; the naive step has {value!r} only, "
                "leave it at that"
            )
    batches = draw_batches(config, BATCHES)
    rate = schedule(config.optimizer, config.train.steps)
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.vocab)
    phase, state = make_phase(
        config,
        config.data.vocab_size,
        None,
        head_name=config.head.name,
        end=config.train.steps,
        shards=mesh.shape[sharding.VOCAB],
    )
    params = _by_path(state.params, config.data.vocab_size)
    load_before = os.getloadavg()
    with contextlib.ExitStack() as stack:
        contestants = {
            "headlab": _headlab(config, phase, state, mesh, batches),
            "naive": _naive(config, params, batches, rate),
        }
        torch_version = None
        if torch_python is not None:
            worker = _TorchWorker(torch_python, config, params, batches, rate)
            contestants["torch.compile"] = stack.enter_context(worker)
            torch_version = worker.version
        turns = _take_turns(contestants, rounds)
    return {
        "head": config.head.name,
        "batch": [config.train.batch_size, config.data.seq_len],
        "rounds": rounds,
        "steps_a_turn": STEPS_A_TURN,
        "contestants": _summarised(turns, config.train.batch_size * config.data.seq_len),
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "cores": _cores(),
        "torch": torch_version,
        "environment": environment(),
    }


def draw_batches(config: Any, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, targets), each [count, batch, length]: ids drawn evenly, for no text is needed."""
    shape = (count, config.train.batch_size, config.data.seq_len + 1)
    ids = np.random.default_rng(seed).integers(0, config.data.vocab_size, shape, dtype=np.int32)
    return np.ascontiguousarray(ids[..., :-1]), np.ascontiguousarray(ids[..., 1:])


def _by_path(params: Any, vocab_size: int) -> dict[str, np.ndarray]:
    """Copies of the parameters by path, without the padding rows of the vocabulary."""
    names, values = jax.tree.leaves(paths(params)), jax.tree.leaves(params)
    return {
        name: np.array(value[:vocab_size] if name.endswith("/weight") else value)
        for name, value in zip(names, values, strict=True)
    }


def _headlab(config: Any, phase: Any, state: Any, mesh: Any, batches: Any) -> Contestant:
    """The step as the trainer compiles it."""
    inputs, targets = batches
    counted = np.ones(inputs.shape[1:], bool)
    specs = state_specs(phase, config, mesh, state)
    state = sharding.place(state, mesh, specs)
    jitted = jax.jit(train_step(phase, config, mesh, specs), donate_argnums=0)
    step = jitted.lower(state, (inputs[0], targets[0], counted)).compile()

    def one(number: int) -> float:
        nonlocal state
        index = number % BATCHES
        state, report = step(state, (inputs[index], targets[index], counted))
        jax.block_until_ready(state)
        return float(report["nats"] / report["weight"])

    return _timed(one)


def _naive(config: Any, params: Mapping[str, np.ndarray], batches: Any, rate: Any) -> Contestant:
    inputs, targets = batches
    step = NaiveStep(config, params, rate)

    def one(number: int) -> float:
        loss = step(inputs[number % BATCHES], targets[number % BATCHES])
        jax.block_until_ready(step.params)
        return float(loss)

    return _timed(one)


def _timed(one: Callable[[int], float]) -> Contestant:
    def turn(numbers: Sequence[int]) -> tuple[list[float], float]:
        seconds, loss = [], float("nan")
        for number in numbers:
            start = time.perf_counter()
            loss = one(number)
            seconds.append(time.perf_counter() - start)
        return seconds, loss

    return turn


class _TorchWorker:
    """The PyTorch step as a contestant, in a process of its own that waits between its turns."""

    def __init__(
        self,
        python: str,
        config: Any,
        params: Mapping[str, np.ndarray],
        batches: tuple[np.ndarray, np.ndarray],
        rate: Callable[[int], Any],
    ):
        self._rate = rate
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        np.savez(folder / "params.npz", allow_pickle=False, **params)
        np.savez(folder / "batches.npz", inputs=batches[0], targets=batches[1])
        model, o = config.model, config.optimizer
        asked = {
            "threads": _cores(),
            "params": str(folder / "params.npz"),
            "batches": str(folder / "batches.npz"),
            "model": {
                "vocab_size": config.data.vocab_size,
                "tied": config.head.name == "tied",
                **{
                    key: model[key]
                    for key in ("d_model", "n_layers", "n_heads", "d_mlp", "max_length")
                },
            },
            "optimizer": {
                "weight_decay": config.groups.body.weight_decay,
                **{key: o[key] for key in ("b1", "b2", "eps", "clip_norm")},
            },
        }
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("torch_step.py")), json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version = self._answer()["torch"]

    def __call__(self, numbers: Sequence[int]) -> tuple[list[float], float]:
        assert self._process.stdin is not None
        request = {"rates": [float(self._rate(number)) for number in numbers]}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return answer["seconds"], answer["loss"]

    def __enter__(self) -> "_TorchWorker":
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # its input ends, and so does it
        self._process.wait()
        self._folder.cleanup()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise HeadlabError(
                f"the PyTorch process ended with code {self._process.wait()}; its own message "
                "stands above. Repair its torch, or name another Python by --torch-python."
            )
        return json.loads(line)


def _take_turns(
    contestants: Mapping[str, Contestant], rounds: int
) -> dict[str, tuple[np.ndarray, float]]:
    """Milliseconds [rounds, STEPS_A_TURN] and last loss of each, after a check of the first."""
    first = {name: turn([0])[1] for name, turn in contestants.items()}
    for name, loss in first.items():
        if not abs(loss - first["naive"]) <= LOSS_TOLERANCE:
            raise HeadlabError(
                f"at equal parameters the loss of {name} is {loss:.6f} and that of naive "
                f"{first['naive']:.6f}, more than {LOSS_TOLERANCE} apart: they do not compute the "
                "same, and their times cannot be compared"
            )
    names = list(contestants)
    for name in names:
        contestants[name](range(1, 1 + STEPS_A_TURN))  # not counted: caches and threads warm up
    seconds: dict[str, list[list[float]]] = {name: [] for name in names}
    losses = {}
    for number in range(rounds):
        start = 1 + (number + 1) * STEPS_A_TURN
        for place in range(len(names)):
            name = names[(number + place) % len(names)]  # nobody always comes after the same one
            taken, losses[name] = contestants[name](range(start, start + STEPS_A_TURN))
            seconds[name].append(taken)
    return {name: (1e3 * np.array(seconds[name]), losses[name]) for name in names}


def _summarised(
    turns: Mapping[str, tuple[np.ndarray, float]], tokens: int
) -> dict[str, dict[str, Any]]:
    medians = {name: np.median(ms, axis=1) for name, (ms, _) in turns.items()}
    return {
        name: {
            "ms": _quartiles(ms),
            "tokens_per_second": tokens / np.median(ms) * 1e3,
            "speed": _quartiles(medians["naive"] / medians[name]),
            "last_loss": loss,
        }
        for name, (ms, loss) in turns.items()
    }


def _quartiles(values: np.ndarray) -> list[float]:
    return np.percentile(values, [25, 50, 75]).tolist()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def python_with_torch(given: str | None) -> str | None:
    """The Python that has torch: the given one, else this one if it does, else None."""
    python = given or sys.executable
    try:
        found = subprocess.run([python, "-c", "import torch"], capture_output=True, check=False)
    except OSError as problem:
        raise UsageError(
            f"--torch-python={given} cannot be run ({problem.strerror}); "
            "name a Python that has torch"
        ) from None
    if found.returncode == 0:
        return python
    if given is not None:
        raise UsageError(f"--torch-python={given} has no torch; install it there, or leave it out")
    return None


def _pieces(config_file: str, batch: int) -> int:
    """Micro-batches of as many sequences as the config's own, or one where they do not divide."""
    train = load(config_file).train
    sequences = train.batch_size // train.micro_batches
    return batch // sequences if batch % sequences == 0 else 1


def _parser() -> argparse.ArgumentParser:
    parser = command_line(
        "train_step",
        "Times headlab's training step beside a naive Flax/Optax one and PyTorch's.",
        rounds=15,
        torch=True,
        epilog="Any option of the config file is set by --config.KEY=VALUE.",
    )
    micro = str(ROOT / "configs" / "micro.py")
    parser.add_argument("--config", default=micro, metavar="FILE", help="default: configs/micro.py")
    parser.add_argument("--head", choices=("tied", "untied", "both"), default="both")
    parser.add_argument("--batch", type=cli.count, default=32, help="sequences (default: 32)")
    return parser


def _print_table(head: str, result: Mapping[str, Any]) -> None:
    batch, length = result["batch"]
    table = Table(
        title=f"{head}: one training step of {batch} x {length} tokens, {result['cores']} cores",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        caption=f"medians of {result['rounds']} rounds of {result['steps_a_turn']} steps, "
        f"quartiles in brackets; load average {result['load_average']['before'][0]:.1f} before",
    )
    table.add_column("step")
    for column in ("ms a step", "tokens/s", "speed against naive"):
        table.add_column(column, justify="right")
    for name, found in result["contestants"].items():
        (low, ms, high), (slow, speed, fast) = found["ms"], found["speed"]
        table.add_row(
            name,
            f"{ms:.0f} ({low:.0f} to {high:.0f})",
            f"{found['tokens_per_second']:,.0f}",
            f"{speed:.2f} ({slow:.2f} to {fast:.2f})",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
