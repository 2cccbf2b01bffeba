"""What the commands share in reading their arguments."""

import argparse
import difflib
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

from headlab.errors import UsageError, nearest

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
    hands_on: bool = False  # all arguments are another program's, as `options.arguments`
    repeatable: tuple[str, ...] = ()  # flags that may be given more than once


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
    overrides: dict[str, str] = {}
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
        if key in overrides:
            raise UsageError(
                f"--config.{key} is given twice, as {overrides[key]!r} and {text!r}; give it once"
            )
        overrides[key] = text
    return rest, list(overrides.items())


def refuse_wrong_flags(
    arguments: Sequence[str], parser: argparse.ArgumentParser, command: Command | None
) -> None:
    """UsageError for a flag that the parser has not, before argparse misses the one that was misspelt; or given twice.

    `command` is that of the parser, None where the arguments begin with no command.
    """
    flags = ["--help", *re.findall(r"--[\w.-]+", parser.format_usage())]
    given: set[str] = set()
    for argument in arguments:
        name = argument.partition("=")[0]
        if not name.startswith("--") or name == "--":
            continue
        if name not in flags:
            raise UsageError(f"{parser.prog} has no {name}; {_meant(name, flags, command)}")
        if name in given and (command is None or name not in command.repeatable):
            raise UsageError(f"{name} is given twice; give it once")
        given.add(name)


def _meant(name: str, flags: Sequence[str], command: Command | None) -> str:
    near = difflib.get_close_matches(name[2:], [flag[2:] for flag in flags], 1, cutoff=0.7)
    if near:
        return f"did you mean --{near[0]}?"
    if command is None:
        return "begin with a command (see headlab --help)"
    if command.takes_overrides:
        from headlab.config.options import OPTIONS
        from headlab.config.tree import nearest as nearest_option

        return f"an option is set by --config.KEY=VALUE: did you mean --config.{nearest_option(name[2:], OPTIONS)}?"
    return f"it has {', '.join(sorted({*flags} - {'--help', '--debug'}))}"


def one_of(*names: str) -> dict[str, Any]:
    """The keyword arguments of an argument that takes one of these names, and names the nearest of them."""

    def check(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(
                f"{text!r} is none of {', '.join(names)}; did you mean {nearest(text, names)}?"
            )
        return text

    return {"type": check, "choices": names}


def path(text: str) -> str:
    """The name of a file or directory, as the type of an argparse argument; "" is what an unset variable leaves."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty; give one, or . for this directory")
    return text


def add_run(parser: argparse.ArgumentParser, *, folders: bool = False) -> None:
    """Adds --workdir RUN; with `folders` one in the Hugging Face layout may stand for a run."""
    what = "the run directory, or a Hugging Face folder" if folders else "the run directory"
    parser.add_argument("--workdir", type=path, required=True, metavar="RUN", help=what)


def count(text: str) -> int:
    """An integer of at least 1, as the type of an argparse argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def checkpoint(text: str) -> int | Literal["last", "best"]:
    """What --step says; UsageError where it is neither last, best nor the step of a checkpoint."""
    if text == "last":
        return "last"
    if text == "best":
        return "best"
    if not text.isdecimal():
        raise UsageError(f"--step is {text!r}; it must be last, best or the step of a checkpoint")
    return int(text)
