"""Fits every head to distributions whose row-centred log P has a known rank, at widths below and above it.

    python -m experiments.softmax_bottleneck.run
    python -m experiments.softmax_bottleneck.run --quick
    python -m experiments.softmax_bottleneck.run --rank=8 --heads=untied,sigsoftmax

The same command goes on where an earlier one was stopped; fits that are done are kept.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headlab import cli
from headlab.errors import UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the experiment from a command line; the exit code is that of `headlab`."""
    return cli.guarded(_run, argv)


def _run(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    from experiments.softmax_bottleneck.known_truth import Truth
    from headlab import heads

    chosen = options.heads.split(",") if options.heads else list(heads.names())
    if options.quick and not options.heads:
        chosen = ["untied", "mixture_of_softmaxes", "sigsoftmax"]
    for name in chosen:
        heads.get(name)  # an unknown name is refused before anything starts
    if not 3 <= options.rank < options.vocab:
        raise UsageError(
            f"--rank is {options.rank}; it must be in 3 … {options.vocab - 1}, so that a head can be narrower, and "
            "below the size of the vocabulary"
        )
    widths = {2, options.rank - 1, options.rank, options.rank + 2}
    truth = Truth(rank=options.rank, vocab=options.vocab, seed=options.seed)
    workdir = Path(options.workdir)
    found = measure(
        truth, chosen, sorted(set(widths)), options.restarts, options.iterations, workdir
    )
    _print(found)
    print(f"written to {workdir / 'known_truth.json'} and {workdir / 'known_truth.png'}")
    return 0


def measure(
    truth: Any,
    heads: Sequence[str],
    widths: Sequence[int],
    restarts: int,
    iterations: int,
    workdir: Path,
) -> dict[str, Any]:
    """Fits what isn't fitted yet, and writes known_truth.json and known_truth.png into `workdir`.

    Returns what is written: "fits" (see `known_truth.fit_all`), the "truth", the numerical rank of its row-centred
    log P, and the settings.
    """
    from experiments.softmax_bottleneck import known_truth
    from headlab.analysis import rank
    from headlab.analysis.plots import draw_excess
    from headlab.runs import environment

    fits = known_truth.fit_all(
        truth, heads, widths, restarts=restarts, iterations=iterations, workdir=workdir
    )
    log_p = known_truth.log_probabilities(truth)
    found = {
        "truth": truth._asdict(),
        "centred_rank": rank(log_p - log_p.mean(axis=1, keepdims=True)).rank,
        "restarts": restarts,
        "iterations": iterations,
        "fits": fits,
        "environment": environment(),
    }
    points = {
        head: [(fit["width"], max(fit["excess"], 1e-12)) for fit in fits if fit["head"] == head]
        for head in heads
    }
    draw_excess(points, truth.rank).savefig(workdir / "known_truth.png", dpi=150)
    text = json.dumps(found, indent=1, allow_nan=False) + "\n"
    (workdir / "known_truth.json").write_text(text, encoding="utf-8")
    return found


def _print(found: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    truth = found["truth"]
    widths = sorted({fit["width"] for fit in found["fits"]})
    table = Table(
        title=f"excess KL, nats a context: row-centred log P of rank {found['centred_rank']}, {truth['contexts']} "
        f"contexts, {truth['vocab']} tokens",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        caption=f"the best of {found['restarts']} restarts; in brackets how far the second best is behind",
    )
    table.add_column("head", overflow="fold")
    for width in widths:
        table.add_column(f"d = {width}", justify="right")
    for head in dict.fromkeys(fit["head"] for fit in found["fits"]):
        own = {fit["width"]: fit for fit in found["fits"] if fit["head"] == head}
        table.add_row(
            head, *(f"{own[w]['excess']:.1e} ({own[w]['agreement']:.0e})" for w in widths)
        )
    Console().print(table)


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m experiments.softmax_bottleneck.run",
        description="Fits every head to distributions of a known rank, at widths below and above it.",
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="three heads in place of all")
    parser.add_argument("--rank", type=cli.count, default=6, help="of row-centred log P (6)")
    parser.add_argument("--vocab", type=cli.count, default=32, help="tokens (32)")
    parser.add_argument("--heads", metavar="NAMES", help="separated by commas; default: all")
    parser.add_argument("--restarts", type=cli.count, default=4, help="of each fit (4)")
    parser.add_argument("--iterations", type=cli.count, default=3000, help="of a restart (3000)")
    parser.add_argument("--seed", type=int, default=0, help="of the distributions (0)")
    parser.add_argument("--workdir", default="runs/softmax_bottleneck", metavar="DIR")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


if __name__ == "__main__":
    sys.exit(main())
