"""`headlab report`."""

import argparse

from headlab.cli.arguments import Command, Overrides, one_of, path
from headlab.cli.commands.compare import METRICS


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        type=path,
        nargs="+",
        metavar="WORKDIR",
        help="directories that hold runs, or run directories",
    )
    parser.add_argument(
        "--output",
        "-o",
        type=path,
        default="report.html",
        metavar="FILE",
        help="default: report.html",
    )
    parser.add_argument("--title", metavar="TEXT", help="default: the heads that are compared")
    parser.add_argument("--baseline", metavar="KEY=VALUE,…", help="see headlab compare")
    parser.add_argument("--metric", **one_of(*METRICS), metavar="NAME", help="see headlab compare")


def _run(options: argparse.Namespace, overrides: Overrides) -> int:
    del overrides
    from headlab.sweeps.page import write_report

    path = write_report(
        options.runs,
        options.output,
        title=options.title,
        baseline=options.baseline,
        metric=options.metric,
    )
    print(path)
    return 0


COMMAND = Command(
    name="report",
    help="write the results of runs as one HTML page",
    description="""
    Write the results of runs as one HTML page that needs no network: tables, loss curves,
    differences with intervals, costs, configurations and versions.""",
    examples="""
    headlab report runs/sweep
    headlab report runs/tied runs/untied -o report.html --title="Tied and untied"
    """,
    add_arguments=_add_arguments,
    run=_run,
)
