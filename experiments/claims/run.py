"""Tests what is said about output heads, claim by claim, and writes a table of what was found.

    python -m experiments.claims.run
    python -m experiments.claims.run rank padding
    python -m experiments.claims.run --list

A claim that was tested, and a run that was trained, is kept in the workdir: the same command goes on where an earlier
one was stopped. What was found at another commit is tested again.
"""

import argparse
import importlib
import json
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.claims import table
from experiments.claims.register import CLAIMS, Claim, chosen
from experiments.claims.runs import COMMAND, OPTIONS, Context, trained_runs
from headlab import cli, files
from headlab.data.progress import duration
from headlab.errors import UsageError

FOLDER = Path(__file__).parent
SEEDS = (0, 1, 2)
TRAINING = 240  # about the CPU seconds of the runs, for the time left


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the experiment from a command line; the exit code is that of `headlab`."""
    return cli.guarded(_run, argv)


def _run(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    claims = chosen(options.names)
    if options.list:
        for claim in CLAIMS:
            print(f"{claim.name:20}{claim.says}")
        return 0
    if options.record and options.names:
        raise UsageError("--record writes the whole table; leave the names of claims away")
    from headlab.runs import environment

    made_by = environment()
    if options.record and (made_by["git"] is None or made_by["git"]["dirty"]):
        raise UsageError(
            "--record is of a commit, and files differ from it here; commit them first"
        )
    workdir = Path(options.workdir)
    found = measure(claims, Context(workdir), made_by)
    known = {claim.name: _kept(workdir, claim.name, _commit(made_by)) for claim in CLAIMS}
    whole = {name: one for name, one in known.items() if one is not None}  # of earlier calls, too
    content = {
        "command": [*COMMAND, *options.names, *["--record"] * options.record],
        "seeds": SEEDS,
        "options": OPTIONS,
        "environment": made_by,
        "runs": trained_runs(workdir),
        "claims": whole,
    }
    _write(workdir / "claims.json", content, workdir / "claims.md", table.markdown(whole))
    if options.record:
        files.write_json(FOLDER / "recorded" / "claims.json", content)
        table.put_into(FOLDER / "README.md", table.markdown(whole))
    _print(found)
    print(f"written to {workdir / 'claims.md'} and {workdir / 'claims.json'}")
    return 0


def measure(
    claims: Sequence[Claim], context: Context, made_by: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """What is found of each claim by name, measured unless it is kept of this commit.

    Each has "verdict", "found" in words, "figures", the "commit", and the CPU "seconds" that it took, those of the
    processes it started included; training is of the first claim that needs it.
    """
    commit = _commit(made_by)
    kept = {claim.name: _kept(context.workdir, claim.name, commit) for claim in claims}
    left = [claim for claim in claims if kept[claim.name] is None]
    start, done = time.monotonic(), 0.0
    all_weights = sum(map(_weights(left).__getitem__, left))
    for claim in left:
        say(f"{claim.name}: {claim.says}{_time_left(start, done, all_weights)}")
        before = cpu_seconds()
        finding = measured(claim, context)
        one = {
            **finding._asdict(),
            "commit": commit,
            "cpu_seconds": round(cpu_seconds() - before, 1),
        }
        # by way of JSON, so that what is kept and what is new are alike
        kept[claim.name] = json.loads(json.dumps(one))
        files.write_json(_path(context.workdir, claim.name), one)
        done += _weights(left)[claim]
        say(f"{claim.name}: {finding.verdict}")
    return {name: one for name, one in kept.items() if one is not None}


def measured(claim: Claim, context: Context) -> Any:
    """The finding of one claim."""
    module, function = claim.measure.split(".")
    return getattr(importlib.import_module(f"experiments.claims.{module}"), function)(context)


def cpu_seconds() -> float:
    """Of this process and those it started and that have ended."""
    every = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in every)


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


def _weights(claims: Sequence[Claim]) -> dict[Claim, float]:
    """What each takes, about; the first that needs the runs takes their training, too."""
    first = next((claim for claim in claims if claim.trains), None)
    return {claim: claim.weight + TRAINING * (claim is first) for claim in claims}


def _time_left(start: float, done: float, every: float) -> str:
    if done <= 0:
        return ""
    seconds = (time.monotonic() - start) / done * (every - done)
    return f" (about {duration(seconds)} left)"


def _commit(made_by: Mapping[str, Any]) -> str | None:
    return (made_by["git"] or {}).get("commit")


def _kept(workdir: Path, name: str, commit: str | None) -> dict[str, Any] | None:
    try:
        one = json.loads(_path(workdir, name).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return one if one.get("commit") == commit else None


def _path(workdir: Path, name: str) -> Path:
    return workdir / "found" / f"{name}.json"


def _write(path: Path, content: Any, table_path: Path, text: str) -> None:
    files.write_json(path, content)
    table_path.write_text(text, encoding="utf-8")


def _print(found: Mapping[str, Mapping[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, show_lines=True)
    for heading in ("claim", "found", "verdict"):
        shown.add_column(heading, overflow="fold")
    for claim in CLAIMS:
        if claim.name in found:
            one = found[claim.name]
            shown.add_row(f"{claim.says} [{claim.name}]", one["found"], one["verdict"])
    Console(markup=False).print(shown)


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m experiments.claims.run",
        description="Tests what is said about output heads, at small size, and writes a table of what was found.",
        epilog="The runs are those of configs/sweeps/tied_vs_untied.py:matched,tiny with the options in runs.py.",
        allow_abbrev=False,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="claims to test (default: all)")
    parser.add_argument("--list", action="store_true", help="show the claims, and test nothing")
    parser.add_argument("--workdir", default="runs/claims", metavar="DIR")
    parser.add_argument(
        "--record", action="store_true", help="write the table into the README and recorded/"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


if __name__ == "__main__":
    sys.exit(main())
