"""The command `headlab`: reads the command line, calls the library, says plainly what went wrong.

Nothing heavy is imported before a command needs it, so that --help answers at once.
"""

import argparse
import difflib
import errno
import json
import os
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from headlab.errors import HeadlabError, UsageError

COMMANDS = ("train", "evaluate", "options")
INTERRUPTED = 130  # 128 + SIGINT, as a shell counts it
LONGEST_LINE = 100  # columns; wider terminals don't make longer paragraphs easier to read
LONGEST_MESSAGE = 1000  # characters of an unforeseen message; --debug shows all of it


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 1 failed, 2 misused, 128 + signal."""
    return guarded(_run, argv)


def guarded(run: Callable[[list[str]], int], argv: Sequence[str] | None = None) -> int:
    """`run(arguments)`, whose exit code it returns; an error becomes a paragraph and an exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        exit_code = run(arguments)
        sys.stdout.flush()  # a reader who left is noticed here, not when Python exits
        return exit_code
    except SystemExit as stop:  # argparse, after it printed help
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        return _fail("interrupted; run the same command again to go on", INTERRUPTED, debug)
    except BrokenPipeError:
        # the reader, such as `head`, has had enough; what is still buffered must not fail at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except HeadlabError as error:
        return _fail(f"error: {error}", error.exit_code, debug)
    except Exception as error:  # noqa: BLE001 (the last resort of a command line)
        return _fail(_unexpected(error), 1, debug)


def _run(arguments: list[str]) -> int:
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        raise UsageError(
            f"no command {arguments[0]!r}; did you mean {_nearest(arguments[0], COMMANDS)}? "
            f"(there are {', '.join(COMMANDS)})"
        )
    arguments, overrides = split_overrides(arguments)
    parser, commands = _parsers()
    _refuse_unknown_flags(arguments, commands.get(arguments[0], parser) if arguments else parser)
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help(sys.stderr)
        return UsageError.exit_code
    if overrides and options.command != "train":
        raise UsageError(
            f"headlab {options.command} takes no --config.{overrides[0][0]}: "
            "the configuration is that of the run"
        )
    if options.command == "train":
        return _train(options, overrides)
    if options.command == "evaluate":
        return _evaluate(options.workdir, options.split, options.batch_size, options.json)
    return _options(options.head)


def _train(options: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> int:
    from headlab.config import load

    # refused, if it must be, before training is imported
    config = load(options.config, overrides)
    given = (options.coordinator, options.processes, options.process_id)
    if not options.distributed and any(value is not None for value in given):
        raise UsageError(
            "--coordinator, --processes and --process-id are of training with many processes: add --distributed"
        )
    if options.distributed:
        from headlab import processes

        processes.start(*given)
    from headlab import training

    training.train(config, options.workdir)
    return 0


def _evaluate(workdir: str, split: str, batch_size: int | None, as_json: bool) -> int:
    from headlab import training

    result = training.evaluate_run(workdir, split=split, batch_size=batch_size)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        rows = [(name, _number(value)) for name, value in _leaves(result)]
        _print_table(f"{workdir}, {split} split", rows)
    return 0


def _options(head: str | None) -> int:
    from headlab import config

    # one line an option when it is piped, so that grep finds all of it
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    section = "seed"
    for option in config.describe(head):
        if option.key.partition(".")[0] != section:
            section = option.key.partition(".")[0]
            print()
        line = f"{option.key}={option.default}".ljust(37) + f" {option.help}: {option.allowed}"
        print(textwrap.fill(line, width, subsequent_indent=" " * 38))
    if head is None:
        print("\nA head has options of its own: headlab options --head=tied")
    return 0


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would print its own message and exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def _parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    def described(text: str, examples: str) -> dict[str, Any]:
        return {
            "description": text,
            "epilog": f"examples:\n{textwrap.indent(textwrap.dedent(examples).strip(), '  ')}",
            "formatter_class": argparse.RawDescriptionHelpFormatter,
            "allow_abbrev": False,
        }

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

    train = subparsers.add_parser(
        "train",
        help="train a model, or go on with a run that was interrupted",
        **described(
            "Train a model. The same command goes on with a run that was interrupted.\n"
            "Any option of the config file is set by --config.KEY=VALUE.",
            """
            headlab train --config=configs/micro.py --workdir=runs/tied
            headlab train --config=configs/micro.py --config.head.name=untied --workdir=runs/untied
            headlab train --config=configs/micro.py --config.train.steps=100 \\
                --config.optimizer.clip_norm=none --workdir=runs/short
            """,
        ),
    )
    train.add_argument(
        "--config", required=True, metavar="FILE", help="config file, FILE.py[:TEXT]"
    )
    # read before argparse, which has no flags with open names; here for --help
    train.add_argument(
        "--config.KEY",
        dest="override",
        metavar="VALUE",
        help="set one option (see headlab options)",
    )
    train.add_argument("--workdir", required=True, metavar="DIR", help="the run directory")
    train.add_argument(
        "--distributed",
        action="store_true",
        help="train with many processes, one command each; a cluster that JAX knows tells the rest",
    )
    train.add_argument(
        "--coordinator", metavar="HOST:PORT", help="of process 0; default: $JAX_COORDINATOR_ADDRESS"
    )
    train.add_argument("--processes", type=count, metavar="N", help="default: $JAX_NUM_PROCESSES")
    train.add_argument(
        "--process-id", type=int, metavar="I", help="0 … N-1; default: $JAX_PROCESS_ID"
    )

    evaluate = subparsers.add_parser(
        "evaluate",
        help="held-out loss of a run",
        **described(
            "Held-out loss of a run's model over all of a split: nats a token, bits a byte.",
            """
            headlab evaluate --workdir=runs/tied
            headlab evaluate --workdir=runs/tied --split=test --json
            """,
        ),
    )
    evaluate.add_argument("--workdir", required=True, metavar="RUN", help="the run directory")
    evaluate.add_argument(
        "--split", choices=("validation", "test"), default="validation", help="default: validation"
    )
    evaluate.add_argument(
        "--batch-size", type=count, metavar="N", help="sequences a batch; default: the run's own"
    )
    evaluate.add_argument("--json", action="store_true", help="print JSON in place of a table")

    options = subparsers.add_parser(
        "options",
        help="list every option with its default",
        **described(
            "List every option of a configuration with its default, its range and what it means.",
            """
            headlab options
            headlab options --head=untied
            """,
        ),
    )
    options.add_argument("--head", metavar="NAME", help="list the options of this head, too")

    for command in subparsers.choices.values():
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser, subparsers.choices


def _refuse_unknown_flags(arguments: Sequence[str], parser: argparse.ArgumentParser) -> None:
    # before argparse, which would first miss the very flag that was misspelt
    flags = ["--help", *re.findall(r"--[\w.-]+", parser.format_usage())]
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("--") and name not in flags:
            raise UsageError(f"{parser.prog} has no {name}; did you mean {_nearest(name, flags)}?")


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


def count(text: str) -> int:
    """An integer of at least 1, as the type of an argparse argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def _nearest(name: str, known: Sequence[str]) -> str:
    return max(known, key=lambda other: difflib.SequenceMatcher(None, name, other).ratio())


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping | list | tuple):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree, start=1)
        for key, value in items:
            yield from _leaves(value, f"{name} {key}".strip().replace("_", " "))
    else:
        yield name, tree


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _print_table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("quantity", overflow="fold")
    table.add_column("value", justify="right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # Text, for brackets in a name are no markup
    Console(file=sys.stdout).print(table)


def _unexpected(error: Exception) -> str:
    for cause in _chain(error):
        code = cause.errno if isinstance(cause, OSError) else None
        # compiled libraries pass the system's words on in exceptions of their own
        if code in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(cause):
            file = cause.filename if isinstance(cause, OSError) else None
            where = f" while writing {file}" if file else ""
            return (
                f"error: the disk is full or its quota used up{where}: free some space, or choose "
                "a --workdir on another disk, and run the same command again; what was saved "
                "before is intact"
            )
    message = textwrap.shorten(str(error), LONGEST_MESSAGE, placeholder=" ...")
    return (
        f"unexpected failure: {type(error).__name__}: {message}; "
        "run again with --debug for the traceback"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def _fail(message: str, exit_code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    paragraph = " ".join(f"headlab: {message}".split())
    width = min(shutil.get_terminal_size((LONGEST_LINE, 24)).columns, LONGEST_LINE)
    # paths and commands stay whole, so that they can be copied
    print(
        textwrap.fill(paragraph, width, break_long_words=False, break_on_hyphens=False),
        file=sys.stderr,
    )
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
