"""Running a sweep: what is finished is kept, what was stopped goes on, and one failure does not stop the rest."""

import itertools
import json
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headlab import config as configs
from headlab import data
from headlab.checkpoint_files import saved_checkpoints
from headlab.runs import RunDirectory
from headlab.sweeps.definition import Plan, PlannedPoint
from headlab.sweeps.directory import SweepDirectory, write_json
from headlab.sweeps.display import Display
from headlab.sweeps.job import Job
from headlab.sweeps.launchers import Launcher, Local, Slurm, SlurmOptions
from headlab.sweeps.sizes import parameters
from headlab.sweeps.states import (
    FAILED,
    FINISHED,
    QUEUED,
    STARTING,
    WAITING,
    Status,
    check_runs,
    status,
    tally,
)
from headlab.training.stopping import Interrupted, stop_signals

if TYPE_CHECKING:
    from headlab.sweeps.launchers import Started

_POLL = 0.1  # seconds between looks at the jobs
_SHOW = 1.0  # seconds between looks at the metrics


class Task(NamedTuple):
    """What one process trains: a point, or a group that is stacked."""

    points: tuple[PlannedPoint, ...]

    @property
    def name(self) -> str:
        """What its logs go by."""
        return self.points[0].name


def run(
    plan: Plan,
    workdir: str,
    *,
    jobs: int = 1,
    retry: bool = False,
    slurm: SlurmOptions | None = None,
    vectorized: bool = False,
    command: Sequence[str] = (),
) -> list[Status]:
    """Runs the points of a plan that are not finished, and returns the status of all.

    Args:
      plan: see `headlab.sweeps.plan`.
      workdir: the directory of the sweep; a point's run directory is WORKDIR/NAME.
      jobs: how many points run at once.
      retry: try points again that failed in an earlier call, too.
      slurm: start jobs on a Slurm cluster, with these options; None: on this machine.
      vectorized: train points that differ in their seed or peak rate alone as one program; see `headlab.sweeps.stacks`.
      command: recorded in sweep.json.

    Raises:
      UsageError: something asked for cannot be done; nothing was started.
      Interrupted: a signal told the sweep to stop; its points saved what they had.
    """
    directory = SweepDirectory(workdir)
    plan = directory.check(plan)
    check_runs(directory, plan.points)
    parameters(plan.points)  # every head takes its options
    _tasks(directory, plan.points, vectorized)  # refused, if it must be, before anything is written
    with ExitStack() as stack:
        stop = stack.enter_context(stop_signals())
        launcher: Launcher = (
            Local(directory, jobs) if slurm is None else Slurm(directory, jobs, slurm)
        )
        stack.enter_context(directory.lock())
        alive = stack.enter_context(directory.sign_of_life())
        directory.write(plan, command)
        to_do = [point for point in plan.points if _is_open(directory, point, retry)]
        _prepare(to_do)
        tasks, notes = _tasks(directory, to_do, vectorized)
        display = Display()
        stack.callback(display.close)
        for note in notes:
            display.say(note)
        crew = _Crew(directory, plan, tasks, launcher, display, alive.path)
        while crew.work():
            if stop and not crew.stopping:
                crew.stopping = True
                alive.end()
                crew.stop()
            time.sleep(_POLL)
        statuses = crew.show()
    if stop:
        raise Interrupted(
            f"the sweep was stopped by {signal.Signals(stop[0]).name} ({tally(statuses)}); what was running is saved. "
            f"Run the same command again to go on: --workdir={workdir}",
            stop[0],
        )
    return statuses


def statuses(plan: Plan, workdir: str) -> list[Status]:
    """How far the points of a plan are; starts and writes nothing.

    Raises UsageError as `run` does.
    """
    directory = SweepDirectory(workdir)
    plan = directory.check(plan)
    check_runs(directory, plan.points)
    return [status(directory, point) for point in plan.points]


def _is_open(directory: SweepDirectory, point: PlannedPoint, retry: bool) -> bool:
    """Whether there is something to do; with `retry`, a recorded failure is forgotten."""
    state = status(directory, point).state
    if state == FAILED and retry:
        directory.forget_failure(point.name)
        return True
    return state not in (FINISHED, FAILED)


def _tasks(
    directory: SweepDirectory, points: Sequence[PlannedPoint], vectorized: bool
) -> tuple[list[Task], list[str]]:
    """What processes are to train, and what is to be said of it."""
    if not vectorized:
        return [Task((point,)) for point in points], []
    from headlab.sweeps.stacks import stacks

    def saved(point: PlannedPoint) -> set[int]:
        return set(saved_checkpoints(RunDirectory(directory.run_path(point.name)).checkpoints_dir))

    groups, notes = stacks(points, saved)
    return [Task(group) for group in groups], notes


def _prepare(points: Sequence[PlannedPoint]) -> None:
    """Builds every corpus, tokenizer and token store that points need, once, before processes want them at once."""
    seen = set()
    for config in (point.config for point in points):
        wanted = (config.data.corpus, config.data.tokenizer, config.data.vocab_size)
        if wanted not in seen:
            seen.add(wanted)
            data.open_dataset(config.data, progress=config.log.progress)


class _Crew:
    """The tasks of one call: which wait, which run, and in which slot."""

    def __init__(
        self,
        directory: SweepDirectory,
        plan: Plan,
        tasks: Sequence[Task],
        launcher: Launcher,
        display: Display,
        alive: str,
    ):
        self.stopping = False
        self._directory, self._plan = directory, plan
        self._queue = list(tasks)
        self._launcher, self._display = launcher, display
        self._alive = alive if launcher.bound else None
        self._running: dict[int, tuple[Task, Started]] = {}
        self._waiting: set[str] = set()
        self._shown = float("-inf")
        if isinstance(launcher, Slurm):
            self._find_running(launcher)

    def work(self) -> bool:
        """Starts what can be started and sees what has ended; whether there is more to do."""
        for slot, (task, started) in list(self._running.items()):
            if self._launcher.done(started):
                del self._running[slot]
                self._ended(task, started)
        if not self.stopping:
            self._start()
        if time.monotonic() - self._shown >= _SHOW:
            self.show()
        return bool(self._running or (self._queue and not self.stopping))

    def stop(self) -> None:
        """Asks everything that runs to save and end."""
        self._launcher.stop([started for _, started in self._running.values()])

    def show(self) -> list[Status]:
        """The statuses of all points, shown."""
        self._shown = time.monotonic()
        live = {name: WAITING for name in self._waiting}
        for task, started in self._running.values():
            state = QUEUED if self._launcher.queued(started) else STARTING
            live |= {point.name: state for point in task.points}
        found = [
            status(self._directory, point, live=live.get(point.name)) for point in self._plan.points
        ]
        self._display.show(found)
        return found

    def _start(self) -> None:
        """Gives the free slots to tasks whose runs no other process writes."""
        self._waiting = {
            point.name for task in self._queue if self._is_held(task) for point in task.points
        }
        ready: list[tuple[int, Task]] = []
        free = self._free_slots()
        for task in [task for task in self._queue if task.name not in self._waiting]:
            slot = next(free, None)
            if slot is None:
                break
            self._queue.remove(task)
            if not all(self._is_finished(point) for point in task.points):  # by another process
                ready.append((slot, task))
        if not ready:
            return
        for _, task in ready:
            self._directory.clear_jobs(task.name)
        jobs = [(task.name, self._job(task, slot)) for slot, task in ready]
        for (slot, task), started in zip(ready, self._launcher.start(jobs), strict=True):
            self._running[slot] = (task, started)
            if not self._launcher.bound:
                write_json(self._job_path(task), {"job_id": started.job_id})
        self._shown = float("-inf")

    def _free_slots(self) -> Iterator[int]:
        slots = itertools.count() if self._launcher.slots is None else range(self._launcher.slots)
        return iter(
            [
                slot
                for slot in itertools.islice(slots, len(self._queue) + len(self._running))
                if slot not in self._running
            ]
        )

    def _job(self, task: Task, slot: int) -> Job:
        return Job(
            str(self._directory.path.absolute()),
            tuple((point.name, configs.to_json(point.config)) for point in task.points),
            self._alive,
            **self._launcher.share(slot),
        )

    def _ended(self, task: Task, started: "Started") -> None:
        """Records what became of a job; it has recorded its own failure, if it could."""
        self._job_path(task).unlink(missing_ok=True)
        self._shown = float("-inf")
        if self._launcher.returned(started) is not None or self.stopping:
            return
        for point in task.points:
            if not self._is_finished(point) and self._directory.failure(point.name) is None:
                self._directory.write_failure(point.name, _silent(started))

    def _find_running(self, launcher: Slurm) -> None:
        """Takes up jobs that an earlier call started and that have not ended."""
        for task in list(self._queue):
            try:
                job_id = json.loads(self._job_path(task).read_text())["job_id"]
            except (FileNotFoundError, ValueError, KeyError):
                continue
            started = launcher.found(job_id)
            if started is not None:
                self._queue.remove(task)
                self._running[len(self._running)] = (task, started)

    def _job_path(self, task: Task) -> Path:
        return self._directory.logs_path(task.name) / "job.json"

    def _is_held(self, task: Task) -> bool:
        return any(self._run(point).is_locked() for point in task.points)

    def _is_finished(self, point: PlannedPoint) -> bool:
        return self._run(point).result() is not None

    def _run(self, point: PlannedPoint) -> RunDirectory:
        return RunDirectory(self._directory.run_path(point.name))


def _silent(started: "Started") -> dict[str, str]:
    """The failure of a process that ended without a word."""
    log = started.paths.stdout
    lines = log.read_text(errors="replace").splitlines()[-20:] if log.exists() else []
    return {
        "kind": "ProcessEnded",
        "error": "its process ended without finishing or saying why: it was killed, or ran out of memory"
        + (f"; the end of its log: {lines[-1]}" if lines else ""),
        "traceback": "\n".join(lines),
    }
