"""`headlab options`."""

import argparse
import shutil
import sys
import textwrap

from headlab.cli.arguments import Command, Overrides


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head", metavar="NAME", help="list the options of this head, too")


def _run(options: argparse.Namespace, overrides: Overrides) -> int:
    del overrides
    from headlab import config

    # one line an option when it is piped, so that grep finds all of it
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    section = "seed"
    for option in config.describe(options.head):
        if option.key.partition(".")[0] != section:
            section = option.key.partition(".")[0]
            print()
        line = f"{option.key}={option.default}".ljust(37) + f" {option.help}: {option.allowed}"
        print(textwrap.fill(line, width, subsequent_indent=" " * 38))
    if options.head is None:
        print("\nA head has options of its own: headlab options --head=tied")
    return 0


COMMAND = Command(
    name="options",
    help="list every option with its default",
    description="List every option of a configuration with its default, its range and what it means.",
    examples="""
    headlab options
    headlab options --head=untied
    """,
    add_arguments=_add_arguments,
    run=_run,
)
