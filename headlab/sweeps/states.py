"""How far the points of a sweep are, read from their directories."""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from headlab import config as configs
from headlab.errors import UsageError
from headlab.run_files import in_words
from headlab.runs import RunDirectory
from headlab.sweeps.definition import PlannedPoint
from headlab.sweeps.directory import SweepDirectory

FINISHED, FAILED, INTERRUPTED, NEW = "finished", "failed", "interrupted", "new"
RUNNING, STARTING = "running", "starting"
WAITING, QUEUED = "waiting", "queued"  # for another process that writes the run; for the cluster

_TAIL = 1 << 16  # bytes of metrics.jsonl that are read for the latest values


class Status(NamedTuple):
    """How far a point is; numbers are None where they are not known."""

    name: str
    state: str
    step: int
    steps: int
    loss: float | None = None  # of training, nats a token
    held_out: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    error: str | None = None


def status(directory: SweepDirectory, point: PlannedPoint, *, live: str | None = None) -> Status:
    """The status of a point; `live` is the state of one that this process is running, None that of the files."""
    run = RunDirectory(directory.run_path(point.name))
    train = point.config.train
    latest = _latest(run)
    step = int(latest.get("step", 0))
    speed = latest.get("timing/tokens_per_second")
    seen: dict[str, Any] = {
        "loss": latest.get("train/loss"),
        "held_out": latest.get("validation/loss"),
    }
    if run.result() is not None:
        return Status(point.name, FINISHED, train.steps, train.steps, **seen)
    if live in (RUNNING, STARTING):
        left = (train.steps - step) * train.batch_size * point.config.data.seq_len
        return Status(
            point.name,
            RUNNING if step else STARTING,
            step,
            train.steps,
            **seen,
            tokens_per_second=speed,
            seconds_left=left / speed if speed else None,
        )
    if live is not None:
        return Status(point.name, live, step, train.steps, **seen)
    failure = directory.failure(point.name)
    if failure is not None:
        return Status(point.name, FAILED, step, train.steps, **seen, error=failure["error"])
    if run.is_locked():
        return Status(point.name, WAITING, step, train.steps, **seen)
    state = INTERRUPTED if run.config_path.exists() else NEW
    return Status(point.name, state, step, train.steps, **seen)


def check_runs(directory: SweepDirectory, points: Iterable[PlannedPoint]) -> None:
    """Raises UsageError where the run directory of a point holds a run of another config, or no run at all."""
    for point in points:
        run = RunDirectory(directory.run_path(point.name))
        if not run.config_path.exists():
            _refuse_other_content(run)
            continue
        # what "auto" means only the corpus can tell: training checks it
        differing = {
            key: pair
            for key, pair in configs.differences(run.config(), point.config).items()
            if pair[1] != "auto"
        }
        if differing:
            raise UsageError(
                f"{run.path} holds a run of another configuration than the point {point.name}: "
                f"{in_words(differing, 'the sweep')}. Choose another --workdir, or move that run away."
            )


def _refuse_other_content(run: RunDirectory) -> None:
    if run.path.exists() and not run.path.is_dir():
        raise UsageError(f"{run.path} is a file where a run would be; move it away.")
    others = run.others()
    if others:
        raise UsageError(
            f"{run.path} is not empty and not a run: it holds {', '.join(others[:5])}; move it away, or choose "
            "another --workdir."
        )


def _latest(run: RunDirectory) -> dict[str, Any]:
    """The latest value of each metric in the tail of metrics.jsonl."""
    latest: dict[str, Any] = {}
    for record in _tail(run):
        latest |= record
    return latest


def _tail(run: RunDirectory) -> Iterable[dict[str, Any]]:
    try:
        with open(run.metrics_path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - _TAIL, 0))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return
    for line in lines if size <= _TAIL else lines[1:]:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # empty after the last newline, or being written
        if isinstance(record, dict):
            yield record


def tally(statuses: Iterable[Status]) -> str:
    """How many points are in each state, as "2 finished, 1 failed"."""
    counts: dict[str, int] = {}
    for each in statuses:
        counts[each.state] = counts.get(each.state, 0) + 1
    return ", ".join(f"{count} {state}" for state, count in counts.items())
