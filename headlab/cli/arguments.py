"""What the commands share in reading their arguments."""

import argparse
import difflib
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from headlab.errors import UsageError

Overrides = Sequence[tuple[str, str]]


class Command(NamedTuple):
    """One command of `headlab`: what its help says, its arguments, and what it does."""

    name: str
    help: str  # one line in the list of commands
    description: str
    examples: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Overrides], int]  # returns the exit code
    takes_overrides: bool = False  # whether --config.KEY=VALUE may be given


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would print its own message and exit."""

    def error(self, message: str) -> NoReturn:
        """UsageError with argparse's message, and where to read more."""
        raise UsageError(f"{message} (see {self.prog} --help)")


def described(text: str, examples: str) -> dict[str, Any]:
    """The keyword arguments of a parser whose help is the text, then examples."""
    return {
        "description": textwrap.dedent(text).strip(),
        "epilog": f"examples:\n{textwrap.indent(textwrap.dedent(examples).strip(), '  ')}",
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Shows --config.KEY in the help; `split_overrides` reads it, for argparse has no flags with open names."""
    parser.add_argument(
        "--config.KEY",
        dest="override",
        metavar="VALUE",
        help="set one option (see headlab options)",
    )


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """The arguments without --config.KEY=VALUE and --config.KEY VALUE, and those pairs."""
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    remaining = iter(arguments)
    for argument in remaining:
        if not argument.startswith("--config."):
            rest.append(argument)
            continue
        key, equals, text = argument.removeprefix("--config.").partition("=")
        if not equals:
            text = next(remaining, "--")
            if text.startswith("--"):
                raise UsageError(f"--config.{key} needs a value: --config.{key}=VALUE")
        overrides.append((key, text))
    return rest, overrides


def refuse_unknown_flags(arguments: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """UsageError for a flag that the parser has not, before argparse misses the one that was misspelt."""
    flags = ["--help", *re.findall(r"--[\w.-]+", parser.format_usage())]
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("--") and name not in flags:
            raise UsageError(f"{parser.prog} has no {name}; did you mean {nearest(name, flags)}?")


def nearest(name: str, known: Sequence[str]) -> str:
    """The known name most like this one."""
    return max(known, key=lambda other: difflib.SequenceMatcher(None, name, other).ratio())


def count(text: str) -> int:
    """An integer of at least 1, as the type of an argparse argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)
