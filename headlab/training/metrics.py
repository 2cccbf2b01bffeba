"""Where the metrics of a run go: metrics.jsonl, TensorBoard events and one line in the terminal.

A record is a flat dictionary such as `{"train/loss": 3.2, "timing/tokens_per_second": 9e4}`. Keys
under `timing/` depend on the machine; all others are the same whenever the run is repeated.
"""

import contextlib
import errno
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from ml_collections import ConfigDict

from headlab.data.progress import duration
from headlab.errors import HeadlabError
from headlab.runs import RunDirectory

Record = Mapping[str, Any]


class Writer(Protocol):
    """A place that metrics go to."""

    def write(self, step: int, record: Record) -> None:
        """Add the metrics of a step: numbers, strings, booleans, None or lists of them."""

    def flush(self) -> None:
        """Put on disk what was written, so that not even a crash of the machine loses it."""

    def close(self) -> None:
        """Flush and let go of everything."""


def open_writers(config: ConfigDict, run: RunDirectory, resume_step: int | None) -> list[Writer]:
    """The writers that `config.log` asks for.

    A run that goes on from `resume_step` keeps its metrics up to and including that step and
    writes the later ones again; with None it begins, and keeps none of an earlier attempt.
    """
    last = -1 if resume_step is None else resume_step
    run.truncate_metrics(last)
    writers: list[Writer] = [JsonlWriter(run.metrics_path)]
    if config.log.tensorboard and importlib.util.find_spec("tensorboardX"):
        writers.append(TensorBoardWriter(run.events_dir, first_step=last + 1))
    if config.log.progress:
        writers.append(TerminalWriter(config.train.steps))
    return writers


class JsonlWriter:
    """Appends one JSON object a line, the step first; each reaches the operating system at once.

    Floats are written so that they read back exactly. JSON has no NaN or infinity: such a value is
    null, and the line gains `"non_finite": {key: "nan" | "inf" | "-inf"}`.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def write(self, step: int, record: Record) -> None:
        """Append the line of `step`.

        Raises:
          ValueError: the record names another step.
          HeadlabError: the line could not be written.
        """
        if record.get("step", step) != step:
            raise ValueError(f"the record of step {step} says that it is of step {record['step']}")
        non_finite: dict[str, str] = {}
        values = {"step": int(step)} | {
            key: _without_non_finite(key, _plain(value), non_finite)
            for key, value in record.items()
        }
        if non_finite:
            values["non_finite"] = non_finite
        line = json.dumps(values, allow_nan=False).encode() + b"\n"
        with _disk_failures_of(self._path):
            # one call a line: a kill leaves at most one torn line, the last
            if os.write(self._file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None:
        """Put the lines on disk."""
        with _disk_failures_of(self._path):
            os.fsync(self._file)

    def close(self) -> None:
        """Put the lines on disk and close the file."""
        file, self._file = self._file, -1
        if file >= 0:
            with _disk_failures_of(self._path):
                try:
                    os.fsync(file)
                finally:
                    os.close(file)


class TensorBoardWriter:
    """Writes the numbers of a record as TensorBoard scalars under their keys.

    Points of `first_step` and later that an earlier process wrote are hidden: none is shown twice.
    """

    def __init__(self, directory: str | os.PathLike[str], *, first_step: int):
        # The event file is written directly: SummaryWriter passes events through a queue, which
        # its flush does not wait for, and a kill would lose points that a checkpoint counts on.
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto import event_pb2

        self._event, self._scalar = event_pb2.Event, summary.scalar
        self._folder = folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names, which begin with the second
        number = sum(1 for _ in folder.iterdir())
        suffix = f".{number:06d}"
        self._file = event_file_writer.EventsWriter(str(folder / "events"), suffix)
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(first_step, session_log=start)

    def write(self, step: int, record: Record) -> None:
        """Add a point to the curve of each key that has a number."""
        for key, value in record.items():
            number = _plain(value)
            if key != "step" and isinstance(number, int | float):
                self._add(step, summary=self._scalar(key, float(number)))

    def flush(self) -> None:
        """Put the points on disk."""
        with _disk_failures_of(self._folder):
            self._file.flush()

    def close(self) -> None:
        """Put the points on disk and close the file."""
        with _disk_failures_of(self._folder):
            self._file.close()

    def _add(self, step: int, **content: Any) -> None:
        with _disk_failures_of(self._folder):
            self._file.write_event(self._event(wall_time=time.time(), step=step, **content))


class TerminalWriter:
    """Shows on standard error how far the run is: a live line with a bar, or plain lines.

    Plain lines, for a file or a pipe, come with the first record, with each held-out loss, with
    the last step, and otherwise every `plain_every` seconds. While the live line stands, what is
    printed to standard output or standard error appears above it.
    """

    def __init__(
        self,
        steps: int,
        *,
        console: Any = None,
        plain_every: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._steps = steps
        self._plain_every = plain_every
        self._clock = clock
        self._console = console or Console(file=sys.stderr)
        self._shown: dict[str, Any] = {}
        self._first: tuple[int, float] | None = None
        self._last_plain = -math.inf
        self._bar: Progress | None = None
        if self._console.is_terminal:
            # no thread of its own: it would take time from the training step
            self._bar = Progress(
                BarColumn(bar_width=24),
                TextColumn("{task.description}", markup=False),
                console=self._console,
                auto_refresh=False,
            )
            self._task = self._bar.add_task("starting", total=steps)
            self._bar.start()

    def write(self, step: int, record: Record) -> None:
        """Show the record, beside the latest value of what it leaves out."""
        now = self._clock()
        self._first = self._first or (step, now)
        self._shown |= {key: _plain(value) for key, value in record.items()}
        line = f"step {step:,}/{self._steps:,}  " + self._line(step, now)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=line, refresh=True)
            return
        worth_a_line = "validation/loss" in record or step >= self._steps
        if worth_a_line or now - self._last_plain >= self._plain_every:
            self._last_plain = now
            # as it is: neither colours, nor [markup], nor lines broken at the width of a pipe
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Leave the last state of the line in the terminal."""
        if self._bar is not None:
            self._bar.stop()

    def _line(self, step: int, now: float) -> str:
        shapes: tuple[tuple[str, Callable[[float], str]], ...] = (
            ("train/loss", "loss {:.4f}".format),
            ("validation/loss", "held-out {:.4f}".format),
            ("timing/tokens_per_second", "{:,.0f} tokens/s".format),
            ("timing/mfu", "MFU {:.1%}".format),
        )
        parts = [
            shape(self._shown[key])
            for key, shape in shapes
            if isinstance(self._shown.get(key), int | float)
        ]
        first_step, first_time = self._first or (step, now)
        if first_step < step < self._steps:
            rate = (now - first_time) / (step - first_step)
            parts.append(f"ETA {duration(rate * (self._steps - step))}")
        return "  ".join(parts)


def _plain(value: Any) -> Any:
    """The Python value of a NumPy or JAX one; a float32 becomes the float64 that equals it."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return np.asarray(value).tolist() if hasattr(value, "dtype") else value


def _without_non_finite(key: str, value: Any, non_finite: dict[str, str]) -> Any:
    if isinstance(value, list):
        return [
            _without_non_finite(f"{key}[{index}]", item, non_finite)
            for index, item in enumerate(value)
        ]
    if isinstance(value, float) and not math.isfinite(value):
        non_finite[key] = repr(value)
        return None
    return value


@contextlib.contextmanager
def _disk_failures_of(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise HeadlabError(
            f"metrics could not be written to {path} ({problem.strerror}); checkpoints are intact. "
            "Free some space, then run the same command again to resume."
        ) from problem
