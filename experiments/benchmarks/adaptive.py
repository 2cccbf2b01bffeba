"""Times the loss of an adaptive softmax with its gradients beside a full softmax's and PyTorch's adaptive module.

    python -m experiments.benchmarks.adaptive
    python -m experiments.benchmarks.adaptive --rounds=20 --torch-python=PATH

Targets are drawn by Zipf's law, other ones in each round and the same for all, who take turns in one run. Both adaptive
softmaxes have the same parameters; gradients are those in the states and all parameters.
"""

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.train_step import python_with_torch
from experiments.benchmarks.turns import (
    Turn,
    command_line,
    in_words,
    quartiles,
    ratios,
    take_turns,
    worker,
    write,
)
from headlab import cli
from headlab.embeddings import Constant
from headlab.heads.adaptive import Adaptive
from headlab.ops import linear_cross_entropy
from headlab.runs import environment

BATCHES = 16  # distinct ones, used in turn
OURS, FULL, THEIRS = "headlab, adaptive", "headlab, full softmax", "PyTorch, adaptive"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark from a command line; the exit code is that of `headlab`."""
    return cli.guarded(_run, argv)


def _run(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    torch_python = python_with_torch(options.torch_python)
    found = benchmark(
        tokens=options.tokens,
        d_model=options.d_model,
        vocab_size=options.vocab_size,
        cutoffs=tuple(options.cutoffs),
        rounds=options.rounds,
        torch_python=torch_python,
    )
    _print_table(found)
    if torch_python is None:
        print("PyTorch is left out: it is not installed. The extra `peers` has it.")
    write(found, options.output)
    return 0


def benchmark(
    *,
    tokens: int,
    d_model: int,
    vocab_size: int,
    cutoffs: tuple[int, ...],
    rounds: int,
    torch_python: str | None = None,
) -> dict[str, Any]:
    """Times loss and gradients; "contestants" has by name "ms" and "over_headlab", quartiles.

    "over_headlab" is the ratio of a contestant's time to that of headlab's adaptive head, round by round.
    """
    # As the paper and PyTorch have it: no offset, no bias, tails of width d // 4ⁱ.
    head = Adaptive(
        vocab_size=vocab_size,
        d_model=d_model,
        rngs=nnx.Rngs(0),
        cutoffs=cutoffs,
        cluster_offset=False,
    )
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, vocab_size + 1)
    targets = rng.choice(vocab_size, (BATCHES, tokens), p=share / share.sum()).astype(np.int32)
    h = rng.normal(size=(tokens, d_model)).astype(np.float32)
    weight = (rng.normal(size=(vocab_size, d_model)) / d_model**0.5).astype(np.float32)
    graph, params, constants = nnx.split(head, nnx.Param, Constant)

    def adaptive(arrays, h, targets):
        return nnx.merge(graph, arrays[0], constants).loss(h, targets).objective

    def full(arrays, h, targets):
        return linear_cross_entropy(h, arrays[0], targets)

    contestants, versions = {}, {}
    contestants[OURS], loss = _ours(adaptive, (params,), h, targets)
    contestants[FULL], _ = _ours(full, (jnp.asarray(weight),), h, targets)
    with contextlib.ExitStack() as stack:
        if torch_python is not None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            path = str(Path(folder) / "arrays.npz")
            np.savez(path, h=h, targets=targets, **_arrays(head))
            asked = {
                "arrays": path,
                "threads": len(os.sched_getaffinity(0)),
                "vocab_size": vocab_size,
                "cutoffs": cutoffs,
                "div_value": 4.0,
                "loss": loss / tokens,
            }
            script = str(Path(__file__).with_name("torch_adaptive.py"))
            turn, version = stack.enter_context(worker(torch_python, script, asked))
            contestants[THEIRS], versions["torch"] = turn, version
        seconds = take_turns(contestants, rounds)
    over = ratios(seconds, OURS)
    return {
        "tokens": tokens,
        "d_model": d_model,
        "vocab_size": vocab_size,
        "cutoffs": cutoffs,
        "tokens_by_band": np.bincount(np.searchsorted(cutoffs, targets.ravel(), "right")).tolist(),
        "rounds": rounds,
        "contestants": {
            name: {"ms": quartiles(1e3 * taken), "over_headlab": over[name]}
            for name, taken in seconds.items()
        },
        "load_average": os.getloadavg(),
        "peers": versions,
        "environment": environment(),
    }


def _ours(loss: Callable[..., jax.Array], arrays: tuple, h, targets) -> tuple[Turn, float]:
    """(a contestant with other targets in each turn, its loss on the first targets)."""
    h, batches = jax.device_put((h, list(targets)))
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    compiled = step.lower(arrays, h, batches[0]).compile()
    number = 0

    def turn() -> float:
        nonlocal number
        batch = batches[number % len(batches)]
        number += 1
        start = time.perf_counter()
        jax.block_until_ready(compiled(arrays, h, batch))
        return time.perf_counter() - start

    return turn, float(compiled(arrays, h, batches[0])[0])


def _arrays(head: Adaptive) -> dict[str, np.ndarray]:
    """The head's parameters as the PyTorch process reads them; nothing is padded."""
    found = {"weight": np.asarray(head.weight[...])}
    for i, tail in enumerate(head.tails):
        found[f"kernel{i}"], found[f"weight{i}"] = map(np.asarray, (tail.kernel, tail.weight))
    return found


def _print_table(found: dict[str, Any]) -> None:
    title = (
        f"Loss and gradients: {found['tokens']} tokens by Zipf's law, d {found['d_model']}, V {found['vocab_size']}, "
        f"cutoffs {list(found['cutoffs'])}, float32, {found['rounds']} rounds; median (quartiles)"
    )
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    for heading in ("", "ms", "its time over headlab's"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, figures in found["contestants"].items():
        table.add_row(name, in_words(figures["ms"], 0), in_words(figures["over_headlab"]))
    Console().print(table)


def _parser() -> argparse.ArgumentParser:
    parser = command_line("adaptive", __doc__.partition("\n")[0], rounds=9, torch=True)
    parser.add_argument(
        "--tokens", type=cli.count, default=1024, help="targets of a batch (default: %(default)s)"
    )
    parser.add_argument(
        "--d-model", type=cli.count, default=128, help="width of the states (default: %(default)s)"
    )
    parser.add_argument(
        "--vocab-size", type=cli.count, default=262_144, help="tokens in all (default: %(default)s)"
    )
    parser.add_argument(
        "--cutoffs",
        type=cli.count,
        nargs="+",
        default=[4096, 32768, 131072],
        help="band ends (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
