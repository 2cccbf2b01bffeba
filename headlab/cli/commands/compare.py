"""`headlab compare`."""

import argparse
import shutil
import sys
from pathlib import Path

from headlab.cli.arguments import Command, Overrides, one_of, path
from headlab.errors import HeadlabError

_FORMATS = ("table", "csv", "json", "markdown")
# kept here, for importing what they stand for would slow down every --help; a test compares them
METRICS = (
    "loss",
    "bits_per_byte",
    "best_loss",
    "test_loss",
    "test_bits_per_byte",
    "train_loss",
    "tokens_per_second",
)
_SORTS = ("metric", "difference", "parameters", "speed", "name")
_PIPE_WIDTH = 160  # columns of characters where no terminal says how many


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        type=path,
        nargs="+",
        metavar="RUNS",
        help="run directories, or directories that hold runs",
    )
    parser.add_argument(
        "--baseline",
        metavar="KEY=VALUE,…",
        help="what differences are to: values, or the name of a run or group; "
        "default: the sweep's own, or the first group",
    )
    parser.add_argument(
        "--metric",
        **one_of(*METRICS),
        help="default: loss, or bits_per_byte between tokenizers",
    )
    parser.add_argument("--format", **one_of(*_FORMATS), default="table", help="default: table")
    parser.add_argument("--output", type=path, metavar="FILE", help="write to a file")
    parser.add_argument(
        "--sort", **one_of(*_SORTS), help="the order of groups; default: the best first"
    )


def _run(options: argparse.Namespace, overrides: Overrides) -> int:
    del overrides
    from headlab.sweeps import comparison, formats, results

    frame = results.table(results.collect(options.runs))
    found = comparison.compare(frame, baseline=options.baseline, metric=options.metric)
    if options.sort is not None:
        found.rows.sort(key=formats.SORTS[options.sort])
    if options.format == "table":
        to_terminal = options.output is None and sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if to_terminal else _PIPE_WIDTH
        text = formats.as_terminal_table(found, frame, width)
    elif options.format == "markdown":
        text = formats.as_markdown(found, frame)
    elif options.format == "json":
        text = formats.as_json(found, frame)
    else:
        text = formats.as_csv(found)
        for note in formats.all_notes(found, frame):
            print(note, file=sys.stderr)
    if options.output is None:
        print(text, end="")
    else:
        write(options.output, text)
    return 0


def write(file: str, text: str) -> None:
    """Writes a result file; HeadlabError where it cannot be."""
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as problem:
        raise HeadlabError(f"{file} could not be written ({problem.strerror})") from problem


COMMAND = Command(
    name="compare",
    help="compare finished runs over seeds",
    description="""
    Compare finished runs: the mean and standard error over seeds of each configuration, and its
    difference to a baseline, paired by seed, with a 95% interval (Student's t).""",
    examples="""
    headlab compare runs/tied runs/untied
    headlab compare runs/sweep --baseline=head=tied
    headlab compare runs/sweep --metric=test_loss --format=csv --output=results.csv
    """,
    add_arguments=_add_arguments,
    run=_run,
)
