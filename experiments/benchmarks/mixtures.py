"""Times mixtures of K softmaxes, loss with all gradients, beside one linear head, and reads what memory each needs.

    python -m experiments.benchmarks.mixtures
    python -m experiments.benchmarks.mixtures --size=4096x128x8192 --experts=2 --experts=4 --rounds=20

All heads are headlab's own, float32, of one vocabulary and width, and take turns in one run. K softmaxes are K times
the products of one; a mixture makes its logits again for the gradients, four multiplies against a linear head's three,
so that 4/3 · K is what to expect. "temporary" is what XLA allocates beyond inputs and gradients.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.head_loss import size_of
from experiments.benchmarks.turns import (
    command_line,
    in_words,
    quartiles,
    ratios,
    take_turns,
    timed,
    write,
)
from headlab import cli, heads
from headlab.runs import environment

SIZE = (2048, 128, 8192)  # tokens, d_model, V
EXPERTS = (1, 2, 4, 8)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark from a command line; the exit code is that of `headlab`."""
    return cli.guarded(_run, argv)


def _run(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    size = size_of(options.size) if options.size else SIZE
    found = benchmark(*size, tuple(options.experts or EXPERTS), options.rounds)
    _print_table(found)
    write(found, options.output)
    return 0


def benchmark(
    tokens: int, d_model: int, vocab: int, experts: Sequence[int], rounds: int
) -> dict[str, Any]:
    """Times loss and gradients of each head.

    Returns:
      contestants: {name: {"experts", "ms", "over_linear" (quartiles of the ratio to the linear head of each round),
        "temporary_bytes", "linear_temporary_bytes" of one linear head's nll at K times the tokens}}, and the size,
        rounds, machine and versions.
    """
    named: dict[str, tuple[str, dict[str, Any]]] = {"linear": ("untied", {})}
    for k in experts:
        named[f"mixture of {k}"] = ("mixture_of_softmaxes", {"n_experts": k})
    compiled = {
        name: _compiled(head, tokens, d_model, vocab, **options)
        for name, (head, options) in named.items()
    }
    turns = {name: timed(program, *inputs) for name, (program, inputs) in compiled.items()}
    seconds = take_turns(turns, rounds)
    over = ratios(seconds, "linear")
    contestants = {}
    for name, (_, options) in named.items():
        k = options.get("n_experts", 1)
        contestants[name] = {
            "experts": k,
            "ms": quartiles(1e3 * seconds[name]),
            "over_linear": over[name],
            "temporary_bytes": _temporary(compiled[name][0]),
            "linear_temporary_bytes": _temporary(
                _compiled("untied", tokens * k, d_model, vocab, method="nll")[0]
            ),
        }
    return {
        "tokens": tokens,
        "d_model": d_model,
        "vocab_size": vocab,
        "rounds": rounds,
        "contestants": contestants,
        "load_average": os.getloadavg(),
        "environment": environment(),
    }


def _compiled(
    name: str, tokens: int, d_model: int, vocab: int, *, method: str = "loss", **options: Any
) -> tuple[Any, tuple[Any, ...]]:
    """(the program of value and gradients in all parameters and states, its inputs)."""
    head = heads.build(name, vocab_size=vocab, d_model=d_model, rngs=nnx.Rngs(0), **options)
    graph, state = nnx.split(head)
    rng = np.random.default_rng(0)
    h = rng.normal(size=(tokens, d_model)).astype(np.float32)
    targets = rng.integers(0, vocab, tokens).astype(np.int32)

    def value(state, h, targets):
        head = nnx.merge(graph, state)
        if method == "nll":
            return jnp.sum(head.nll(h, targets))
        return head.loss(h, targets).objective

    inputs = jax.device_put((state, h, targets))
    step = jax.jit(jax.value_and_grad(value, argnums=(0, 1)))
    return step.lower(*inputs).compile(), inputs


def _temporary(program: Any) -> int:
    return program.memory_analysis().temp_size_in_bytes


def _parser() -> argparse.ArgumentParser:
    parser = command_line(
        "mixtures", "Times mixtures of softmaxes beside one linear head.", rounds=10, torch=False
    )
    text = "x".join(map(str, SIZE))
    parser.add_argument("--size", metavar="TOKENSxDxV", help=f"default: {text}")
    parser.add_argument(
        "--experts",
        type=cli.count,
        action="append",
        metavar="K",
        help="a number of experts, given once or more (default: 1, 2, 4 and 8)",
    )
    return parser


def _print_table(found: dict[str, Any]) -> None:
    sizes = f"{found['tokens']} tokens, d {found['d_model']}, V {found['vocab_size']}"
    table = Table(
        title=f"loss and gradients: {sizes}, float32",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        caption=f"medians of {found['rounds']} rounds, quartiles in brackets; "
        f"load average {found['load_average'][0]:.1f}",
    )
    table.add_column("head")
    for column in (
        "ms",
        "time over linear",
        "and over K",
        "temporary MB",
        "linear nll of K times the tokens, MB",
    ):
        table.add_column(column, justify="right")
    for name, row in found["contestants"].items():
        k = row["experts"]
        table.add_row(
            name,
            in_words(row["ms"], 0),
            in_words(row["over_linear"]),
            in_words([ratio / k for ratio in row["over_linear"]]),
            f"{row['temporary_bytes'] / 1e6:.1f}",
            f"{row['linear_temporary_bytes'] / 1e6:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
