"""Reads from compiled programs, without running them, how much memory the loss of a linear head needs.

    python -m experiments.benchmarks.memory
    python -m experiments.benchmarks.memory --size=8192x2304x256000 --dtype=bfloat16

"temporary" is what XLA allocates beyond inputs and outputs: the loss, and with gradients those in h and weight.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.head_loss import size_of
from experiments.benchmarks.turns import write
from headlab import cli
from headlab.ops import linear_cross_entropy
from headlab.runs import environment

SIZES = ((8192, 2304, 256_000), (16_384, 2304, 512_000))  # tokens, d_model, V: doubled
DTYPES = ("float32", "bfloat16")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark from a command line; the exit code is that of `headlab`."""
    return cli.guarded(_run, argv)


def _run(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    sizes = [size_of(text) for text in options.sizes] if options.sizes else SIZES
    rows = [
        {"method": method, "dtype": dtype, "tokens": size[0], "d_model": size[1], "vocab": size[2]}
        | {"gradients": gradients, **measure(method, dtype, *size, gradients=gradients)}
        for dtype in options.dtypes or DTYPES
        for size in sizes
        for method in METHODS
        for gradients in (False, True)
    ]
    _print_table(rows)
    write({"rows": rows, "environment": environment()}, options.output)
    return 0


def _materialised(h, weight, targets):
    logits = jax.lax.dot_general(
        h, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).sum()


METHODS = {
    "headlab": lambda h, weight, targets: linear_cross_entropy(h, weight, targets),
    "logits materialised": _materialised,
}


def measure(
    method: str, dtype: str, tokens: int, d_model: int, vocab: int, *, gradients: bool
) -> dict[str, Any]:
    """Bytes that the compiled loss needs: "temporary", "arguments" and "outputs".

    h and weight have the given dtype. Nothing is computed and no array of these sizes exists here.
    """
    shapes = (
        jax.ShapeDtypeStruct((tokens, d_model), dtype),
        jax.ShapeDtypeStruct((vocab, d_model), dtype),
        jax.ShapeDtypeStruct((tokens,), "int32"),
    )
    loss = METHODS[method]
    function = jax.value_and_grad(loss, argnums=(0, 1)) if gradients else loss
    compiled = jax.jit(function).lower(*shapes).compile()
    analysis = compiled.memory_analysis()
    return {
        "temporary": analysis.temp_size_in_bytes,
        "arguments": analysis.argument_size_in_bytes,
        "outputs": analysis.output_size_in_bytes,
    }


def _print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(
        title="Memory of the loss of a linear head, read from the compiled program, MB",
        box=box.SIMPLE,
        title_justify="left",
    )
    for heading in ("method", "dtype", "tokens", "d", "V"):
        table.add_column(heading, justify="left" if heading in ("method", "dtype") else "right")
    for heading in ("loss alone", "with gradients", "inputs", "gradients"):
        table.add_column(heading, justify="right")
    for alone, both in zip(rows[::2], rows[1::2], strict=True):
        table.add_row(
            *(str(alone[key]) for key in ("method", "dtype", "tokens", "d_model", "vocab")),
            *(f"{alone['temporary'] / 1e6:,.0f}", f"{both['temporary'] / 1e6:,.0f}"),
            *(f"{both['arguments'] / 1e6:,.0f}", f"{both['outputs'] / 1e6:,.0f}"),
        )
    Console().print(table)


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m experiments.benchmarks.memory",
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--size", dest="sizes", action="append", metavar="TOKENSxDxV")
    parser.add_argument("--dtype", dest="dtypes", action="append", choices=DTYPES)
    parser.add_argument(
        "--output", metavar="FILE", default="runs/benchmarks/memory.json", help="where JSON goes"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
