"""The entry of the command line: finds the command and runs it."""

import argparse
import sys
from collections.abc import Mapping, Sequence

from headlab.cli.arguments import (
    Parser,
    add_overrides,
    described,
    refuse_wrong_flags,
    split_overrides,
)
from headlab.cli.commands import COMMANDS
from headlab.cli.failures import guarded
from headlab.errors import UsageError, nearest


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 1 failed, 2 misused, 128 + signal."""
    return guarded(_run, argv)


def _run(arguments: list[str]) -> int:
    commands = {command.name: command for command in COMMANDS}
    named = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if named is not None and named not in commands:
        raise UsageError(
            f"no command {named!r}; did you mean {nearest(named, [*commands])}? "
            f"(there are {', '.join(commands)})"
        )
    if (
        named is not None
        and commands[named].hands_on
        and arguments[1:2] not in (["--help"], ["-h"])
    ):
        others = [argument for argument in arguments[1:] if argument != "--debug"]
        return commands[named].run(argparse.Namespace(arguments=others), [])
    arguments, overrides = split_overrides(arguments)
    parser, parsers = _parsers()
    if named is None:
        refuse_wrong_flags(arguments, parser, None)
    else:
        refuse_wrong_flags(arguments, parsers[named], commands[named])
    options, rest = parser.parse_known_args(arguments)
    if options.command is None:
        parser.print_help(sys.stderr)
        return UsageError.exit_code
    command = commands[options.command]
    if rest:
        raise UsageError(
            f"headlab {command.name} has no place for {rest[0]!r}; a text with spaces stands in quotes "
            f"(see headlab {command.name} --help)"
        )
    if overrides and not command.takes_overrides:
        raise UsageError(
            f"headlab {command.name} takes no --config.{overrides[0][0]}: "
            "the configuration is that of the run"
        )
    return command.run(options, overrides)


def _parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    parser = Parser(
        prog="headlab",
        **described(
            "Train and evaluate language models that differ in their output head.",
            """
            headlab train --config=configs/micro.py --workdir=runs/tied
            headlab evaluate --workdir=runs/tied
            headlab options
            """,
        ),
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for command in COMMANDS:
        own = subparsers.add_parser(
            command.name, help=command.help, **described(command.description, command.examples)
        )
        command.add_arguments(own)
        if command.takes_overrides:
            add_overrides(own)
        own.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser, subparsers.choices
