"""What the softmax bottleneck costs: on distributions of known rank, on text, and as the head becomes wider.

    python -m experiments.softmax_bottleneck.run known_truth
    python -m experiments.softmax_bottleneck.run text_ranks --contexts=10000
    python -m experiments.softmax_bottleneck.run width --jobs=2
    python -m experiments.softmax_bottleneck.run --quick

The same command goes on where an earlier one was stopped; fits, runs and ranks that are done are kept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headlab import cli
from headlab.errors import HeadlabError, UsageError

if TYPE_CHECKING:
    from experiments.softmax_bottleneck.trained import How

PARTS = ("known_truth", "text_ranks", "width")
CONTEXTS, QUICK_CONTEXTS = 10_000, 1_024

#: flags of known_truth and their defaults, and those of the parts that train
_QUICK_TRUTH = {"heads": "untied,mixture_of_softmaxes,sigsoftmax", "restarts": 2, "iterations": 500}
_TRUTH = {"rank": 6, "vocab": 32, "heads": "", "restarts": 4, "iterations": 3000, "seed": 0}
_TRAINED = ("contexts", "jobs", "vectorized", "retry", "measure_only")
_SEARCH = ("search_steps", "search_rate")  # of width

_Measure = Callable[[], int]  # measures, writes and prints; how many points haven't finished


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the experiment from a command line; the exit code is that of `headlab`."""
    return cli.guarded(_run, argv)


def _run(arguments: list[str]) -> int:
    given, overrides = cli.split_overrides(arguments)
    options = _parser().parse_args(given)
    parts = _parts(options, overrides)
    default = "runs/softmax_bottleneck" + ("-quick" if options.quick else "")
    workdir = Path(options.workdir or default)
    # Everything is trained before anything is measured: this process must not hold a device that others train on.
    measures: list[_Measure] = []
    if "known_truth" in parts:
        measures.append(_known_truth(options, workdir))
    if set(parts) - {"known_truth"}:
        how = _how(options, overrides, arguments)
        measures += [_trained(part, workdir, how) for part in parts if part != "known_truth"]
    unfinished = sum(measure() for measure in measures)
    if unfinished:
        raise HeadlabError(
            f"{unfinished} runs have not finished; {workdir} has what is measured of the others, and the names under "
            '"unfinished". The same command goes on with them, and with --retry with those that failed'
        )
    return 0


def _parts(options: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """The parts that were asked for; UsageError for a flag of a part that wasn't."""
    of_truth = [flag for flag in _TRUTH if getattr(options, flag) is not None]
    of_trained = [flag for flag in _TRAINED if getattr(options, flag)]
    part = options.part
    if part is None:
        part = "known_truth" if of_truth or not options.quick else "all"
    if of_truth and part not in ("known_truth", "all"):
        raise UsageError(f"--{of_truth[0]} is of known_truth, not of {part}; leave it away")
    of_search = [flag for flag in _SEARCH if getattr(options, flag) is not None]
    if of_search and part not in ("width", "all"):
        flag = of_search[0].replace("_", "-")
        raise UsageError(f"--{flag} is of width, not of {part}; leave it away")
    if part == "known_truth" and (of_trained or overrides):
        flag = of_trained[0].replace("_", "-") if of_trained else f"config.{overrides[0][0]}"
        raise UsageError(
            f"--{flag} is of text_ranks and width, not of known_truth: name one of them, or all"
        )
    return PARTS if part == "all" else (part,)


def _known_truth(options: argparse.Namespace, workdir: Path) -> _Measure:
    """Checks what part 1 was asked for, and returns what does it."""
    asked = {flag: getattr(options, flag) for flag in _TRUTH}
    default = {**_TRUTH, **(_QUICK_TRUTH if options.quick else {})}
    asked = {flag: default[flag] if value is None else value for flag, value in asked.items()}
    from experiments.softmax_bottleneck import known_truth
    from headlab import heads

    chosen = asked["heads"].split(",") if asked["heads"] else list(heads.names())
    for name in chosen:
        heads.get(name)  # an unknown name is refused before anything starts
    rank = asked["rank"]
    if not 3 <= rank < asked["vocab"]:
        raise UsageError(
            f"--rank is {rank}; it must be in 3 … {asked['vocab'] - 1}, so that a head can be narrower, and "
            "below the size of the vocabulary"
        )
    widths = sorted({2, rank - 1, rank, rank + 2})
    truth = known_truth.Truth(rank=rank, vocab=asked["vocab"], seed=asked["seed"])

    def measure() -> int:
        found = known_truth.measure(
            truth, chosen, widths, asked["restarts"], asked["iterations"], workdir
        )
        known_truth.show(found)
        _written("known_truth", workdir)
        return 0

    return measure


def _how(
    options: argparse.Namespace, overrides: Sequence[tuple[str, str]], arguments: Sequence[str]
) -> How:
    from experiments.softmax_bottleneck.trained import How

    return How(
        contexts=options.contexts or (QUICK_CONTEXTS if options.quick else CONTEXTS),
        overrides=tuple(overrides),
        tiny=options.quick,
        jobs=options.jobs or 1,
        vectorized=options.vectorized,
        retry=options.retry,
        measure_only=options.measure_only,
        search_steps=options.search_steps,
        search_rate=options.search_rate,
        command=("python", "-m", "experiments.softmax_bottleneck.run", *arguments),
    )


def _trained(part: str, workdir: Path, how: How) -> _Measure:
    """Trains a part's runs, and returns what measures them."""
    from experiments.softmax_bottleneck import text_ranks, width

    module: Any = {"text_ranks": text_ranks, "width": width}[part]
    found = module.trained(workdir, how)

    def measure() -> int:
        results = module.measure(found, workdir, how)
        module.show(results)
        _written(part, workdir)
        return len(results["unfinished"])

    return measure


def _written(part: str, workdir: Path) -> None:
    there = [path for path in (workdir / f"{part}.json", workdir / f"{part}.png") if path.exists()]
    print(f"written to {' and '.join(map(str, there))}")


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m experiments.softmax_bottleneck.run",
        description="Part 1, known_truth: fits every head to distributions of a known rank. Part 2, text_ranks: trains "
        "every head, and measures the rank of its log-probabilities on held-out text. Part 3, width: loss and rank of "
        "one softmax and of a mixture, by the width of the head.",
        epilog="Any option of the config of text_ranks' and width's runs is set by --config.KEY=VALUE (see headlab "
        "options).",
        allow_abbrev=False,
    )
    parser.add_argument(
        "part",
        nargs="?",
        choices=(*PARTS, "all"),
        help="default: known_truth, or with --quick alone all",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="all parts at tiny size, in minutes: fewer heads, 60 steps",
    )
    parser.add_argument("--workdir", metavar="DIR", help="default: runs/softmax_bottleneck[-quick]")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    truth = parser.add_argument_group("known_truth")
    truth.add_argument("--rank", type=cli.count, help="of row-centred log P (6)")
    truth.add_argument("--vocab", type=cli.count, help="tokens (32)")
    truth.add_argument("--heads", metavar="NAMES", help="separated by commas; default: all")
    truth.add_argument("--restarts", type=cli.count, help="of each fit (4; 2 with --quick)")
    truth.add_argument("--iterations", type=cli.count, help="of a restart (3000; 500 with --quick)")
    truth.add_argument("--seed", type=int, help="of the distributions (0)")
    trained = parser.add_argument_group("text_ranks and width")
    trained.add_argument(
        "--contexts",
        type=cli.count,
        metavar="N",
        help=f"held-out positions of each matrix ({CONTEXTS:,}; {QUICK_CONTEXTS:,} with --quick)",
    )
    trained.add_argument("--jobs", type=cli.count, metavar="N", help="runs at once (1)")
    trained.add_argument(
        "--vectorized", action="store_true", help="train seeds or rates of one head as one program"
    )
    trained.add_argument("--retry", action="store_true", help="try runs again that failed before")
    trained.add_argument(
        "--measure-only", action="store_true", help="train nothing; measure what has finished"
    )
    trained.add_argument(
        "--search-steps",
        type=cli.count,
        metavar="N",
        help="of the runs of width's search for rates (2000, or those of --config.train.steps)",
    )
    trained.add_argument(
        "--search-rate",
        metavar="RATE",
        help="the middle of the five peak rates that width tries (0.0014)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
