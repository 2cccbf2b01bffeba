"""Times the loss of a linear head with its gradients beside the same by Optax, tokamax, PyTorch and bare multiplies.

    python -m experiments.benchmarks.head_loss
    python -m experiments.benchmarks.head_loss --rounds=20 --torch-python=PATH

All compute Σ −log softmax(h·weightᵀ)[target] and its gradients in h and weight, in float32, and take turns in one run.
"""

import argparse
import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.train_step import python_with_torch
from experiments.benchmarks.turns import (
    command_line,
    in_words,
    quartiles,
    ratios,
    take_turns,
    timed,
    worker,
    write,
)
from headlab import cli
from headlab.errors import HeadlabError, UsageError
from headlab.ops import linear_cross_entropy
from headlab.runs import environment

SIZES = ((4096, 128, 8192), (2048, 512, 32768))  # tokens, d_model, V
LOSS_TOLERANCE = 1e-5  # relative


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark from a command line; the exit code is that of `headlab`."""
    return cli.guarded(_run, argv)


def _run(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    sizes = [size_of(text) for text in options.sizes] if options.sizes else SIZES
    torch_python = python_with_torch(options.torch_python)
    results = []
    for tokens, d_model, vocab in sizes:
        found = benchmark(tokens, d_model, vocab, options.rounds, torch_python)
        _print_table(found)
        results.append(found)
    for name, missing in (("tokamax", not _tokamax()), ("PyTorch", torch_python is None)):
        if missing:
            print(f"{name} is left out: it is not installed. The extra `peers` has it.")
    write(results, options.output)
    return 0


def benchmark(
    tokens: int, d_model: int, vocab: int, rounds: int, torch_python: str | None = None
) -> dict[str, Any]:
    """Times loss and gradients at one size; "contestants" has by name "ms" and "over_headlab", quartiles.

    "over_headlab" is the ratio of a contestant's time to headlab's, round by round.

    Raises HeadlabError where the contestants' losses differ.
    """
    rng = np.random.default_rng(0)
    h = rng.normal(size=(tokens, d_model)).astype(np.float32)
    weight = (rng.normal(size=(vocab, d_model)) / d_model**0.5).astype(np.float32)
    targets = rng.integers(0, vocab, tokens).astype(np.int32)
    on_device = jax.device_put((h, weight, targets))
    contestants = {}
    losses = {}
    for name, loss in _losses().items():
        compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*on_device).compile()
        contestants[name] = timed(compiled, *on_device)
        losses[name] = float(compiled(*on_device)[0])
    for name, value in losses.items():
        if not abs(value / losses["headlab"] - 1) < LOSS_TOLERANCE:
            raise HeadlabError(
                f"the loss of {name} is {value} and headlab's {losses['headlab']}: they do not compute the same"
            )
    contestants["three multiplies"] = timed(*_three_multiplies(*on_device))
    versions = {}
    with contextlib.ExitStack() as stack:
        if torch_python is not None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            arrays = str(Path(folder) / "arrays.npz")
            np.savez(arrays, h=h, weight=weight, targets=targets)
            asked = {"arrays": arrays, "threads": len(os.sched_getaffinity(0))}
            script = str(Path(__file__).with_name("torch_loss.py"))
            turn, version = stack.enter_context(worker(torch_python, script, asked))
            contestants["torch.compile"], versions["torch"] = turn, version
        seconds = take_turns(contestants, rounds)
    over = ratios(seconds, "headlab")
    return {
        "tokens": tokens,
        "d_model": d_model,
        "vocab_size": vocab,
        "rounds": rounds,
        "contestants": {
            name: {"ms": quartiles(1e3 * taken), "over_headlab": over[name]}
            for name, taken in seconds.items()
        },
        "load_average": os.getloadavg(),
        "peers": versions,
        "environment": environment(),
    }


def _losses() -> dict[str, Callable[..., jax.Array]]:
    def materialised(h, weight, targets):
        logits = h @ weight.T
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).sum()

    losses: dict[str, Callable[..., jax.Array]] = {
        "headlab": lambda h, weight, targets: linear_cross_entropy(h, weight, targets),
        "optax, logits materialised": materialised,
    }
    tokamax = _tokamax()
    if tokamax:
        losses["tokamax, XLA"] = lambda h, weight, targets: (
            tokamax.linear_softmax_cross_entropy_loss(h, targets, weight.T, implementation="xla")
        )
    return losses


def _tokamax() -> Any:
    try:
        import tokamax
        from absl import flags
    except ImportError:
        return None
    flags.FLAGS.mark_as_parsed()  # else tokamax reads this command's arguments as its own
    return tokamax


def _three_multiplies(h, weight, targets):
    """What no exact method can do without: logits, dh and dweight, each one matrix multiply in its best layout."""
    logits = jnp.zeros((weight.shape[0], h.shape[0]), jnp.float32)

    def multiply(h, weight, logits, turned):
        return weight @ h.T, turned @ logits, logits @ h

    arguments = (h, weight, logits, jnp.copy(weight.T))
    return jax.jit(multiply).lower(*arguments).compile(), *arguments


def _print_table(found: dict[str, Any]) -> None:
    title = (
        f"Loss and gradients of a linear head: {found['tokens']} tokens, d {found['d_model']}, "
        f"V {found['vocab_size']}, float32, {found['rounds']} rounds; median (quartiles)"
    )
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    for heading in ("", "ms", "headlab's time over it"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, figures in found["contestants"].items():
        inverse = [1 / value for value in reversed(figures["over_headlab"])]
        table.add_row(name, in_words(figures["ms"], 0), in_words(inverse))
    Console().print(table)


def size_of(text: str) -> tuple[int, int, int]:
    """(tokens, d_model, V) of a text such as "4096x128x8192"; UsageError where it is none."""
    try:
        tokens, d_model, vocab = (int(part) for part in text.split("x"))
        if min(tokens, d_model, vocab) < 1:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"--size={text}: it must be tokens x d_model x V, such as 4096x128x8192"
        ) from None
    return tokens, d_model, vocab


def _parser() -> argparse.ArgumentParser:
    parser = command_line("head_loss", __doc__.partition("\n")[0], rounds=9, torch=True)
    parser.add_argument("--size", dest="sizes", action="append", metavar="TOKENSxDxV")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
