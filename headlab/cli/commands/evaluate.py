"""`headlab evaluate`."""

import argparse
import json

from headlab.cli.arguments import Command, Overrides, add_run, count, one_of
from headlab.cli.tables import leaves, number, print_table


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--split",
        **one_of("validation", "test"),
        default="validation",
        help="default: validation",
    )
    parser.add_argument(
        "--batch-size", type=count, metavar="N", help="sequences a batch; default: the run's own"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")


def _run(options: argparse.Namespace, overrides: Overrides) -> int:
    del overrides
    from headlab import training

    result = training.evaluate_run(
        options.workdir, split=options.split, batch_size=options.batch_size
    )
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        rows = [(name, number(value)) for name, value in leaves(result)]
        print_table(f"{options.workdir}, {options.split} split", rows)
    return 0


COMMAND = Command(
    name="evaluate",
    help="held-out loss of a run",
    description="Held-out loss of a run's model over all of a split: nats a token, bits a byte.",
    examples="""
    headlab evaluate --workdir=runs/tied
    headlab evaluate --workdir=runs/tied --split=test --json
    """,
    add_arguments=_add_arguments,
    run=_run,
)
