"""Contestants that take turns in one run, so that whatever else the machine does falls on all of them alike."""

import argparse
import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from headlab import cli, files
from headlab.errors import HeadlabError

Turn = Callable[[], float]
"""One measured run; its seconds."""


def command_line(
    name: str, description: str, *, rounds: int, torch: bool, epilog: str | None = None
) -> argparse.ArgumentParser:
    """The command line of the benchmark `name`, with what all of them are asked; `torch`: one of them is PyTorch's."""
    made = cli.Parser(
        prog=f"python -m experiments.benchmarks.{name}",
        description=description,
        epilog=epilog,
        allow_abbrev=False,
    )
    default = "default: %(default)s"
    made.add_argument("--rounds", type=cli.count, default=rounds, help=f"turns of each ({default})")
    made.add_argument(
        "--output",
        default=f"runs/benchmarks/{name}.json",
        metavar="FILE",
        help=f"where JSON goes ({default})",
    )
    if torch:
        made.add_argument("--torch-python", metavar="PATH", help="a Python that has torch")
    made.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return made


def write(found: Any, output: str) -> None:
    """Writes what was found as JSON, and says where."""
    files.write_json(Path(output), found)
    print(f"written to {output}")


def timed(function: Callable[..., Any], *arguments: Any) -> Turn:
    """A compiled JAX function as a contestant: the time of one call until its results are there."""

    def turn() -> float:
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        return time.perf_counter() - start

    return turn


def take_turns(contestants: Mapping[str, Turn], rounds: int) -> dict[str, np.ndarray]:
    """Seconds [rounds] of each contestant, in an order that rotates; one more round before them is not counted."""
    names = list(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):
        for place in range(len(names)):
            name = names[(number + place) % len(names)]  # nobody always comes after the same one
            taken = contestants[name]()
            if number >= 0:
                seconds[name].append(taken)
    return {name: np.array(taken) for name, taken in seconds.items()}


def ratios(seconds: Mapping[str, np.ndarray], against: str) -> dict[str, list[float]]:
    """[first quartile, median, third quartile] over rounds of each contestant's time over that of `against`."""
    return {name: quartiles(taken / seconds[against]) for name, taken in seconds.items()}


def quartiles(values: np.ndarray) -> list[float]:
    """[first quartile, median, third quartile]."""
    return np.percentile(values, [25, 50, 75]).tolist()


def in_words(three: list[float], digits: int = 2) -> str:
    """Quartiles as "median (first to third)"."""
    low, middle, high = (f"{value:.{digits}f}" for value in three)
    return f"{middle} ({low} to {high})"


@contextlib.contextmanager
def worker(python: str, script: str, asked: Mapping[str, Any]) -> Iterator[tuple[Turn, str]]:
    """(turn, version) of a contestant in a process of its own, which waits between its turns.

    The script reads `asked` as JSON from its argument, prints `{"version": …}` and answers each line of standard input
    by `{"seconds": …}`.

    Raises HeadlabError where the process ends by itself.
    """
    process = subprocess.Popen(
        [python, script, json.dumps(asked)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None

    def answer() -> dict[str, Any]:
        line = process.stdout.readline()
        if not line:
            raise HeadlabError(
                f"{script} ended with code {process.wait()}; its own message stands above. Repair the "
                f"torch of {python}, or name another Python by --torch-python."
            )
        return json.loads(line)

    def turn() -> float:
        process.stdin.write("\n")
        process.stdin.flush()
        return answer()["seconds"]

    try:
        yield turn, answer()["version"]
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # its input ends, and so does it
        process.wait()
