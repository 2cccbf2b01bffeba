"""How the processes of a sweep are started: submitit's local executor, or its Slurm executor for a cluster."""

import contextlib
import dataclasses
import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headlab.data.cache import cache_dir
from headlab.errors import HeadlabError, UsageError
from headlab.sweeps.directory import SweepDirectory
from headlab.sweeps.job import INTERRUPTED, SECONDS_TO_SAVE, Job

if TYPE_CHECKING:
    import submitit

    Started = submitit.Job[str]
    """A job that was handed to a launcher."""

_LEAST_MINUTES = 3
_REQUEUES = 10**6  # a job that gets nowhere gives up by itself
_SLURM_COMMANDS = ("sbatch", "srun", "squeue", "scancel")
_ASK = 5.0  # seconds between questions to squeue
_ABSENT = 3  # answers without a job, after which it is over
_FOREVER = 60 * 24 * 365 * 10  # minutes; submitit's local executor always has a limit


class Launcher(Protocol):
    """Starts jobs."""

    @property
    def bound(self) -> bool:
        """Whether jobs end when the sweep's process does."""

    @property
    def slots(self) -> int | None:
        """How many jobs may be started at once; None: all."""

    def start(self, jobs: Sequence[tuple[str, Job]]) -> list["Started"]:
        """Starts jobs, whose logs go by these names."""

    def share(self, slot: int) -> dict[str, Any]:
        """The `environ` and `cores` of the job in a slot."""

    def done(self, started: "Started") -> bool:
        """Whether a job has ended."""

    def queued(self, started: "Started") -> bool:
        """Whether a job still waits to be started."""

    def returned(self, started: "Started") -> str | None:
        """What a job that is done returned; None if it ended without returning."""

    def stop(self, started: Sequence["Started"]) -> None:
        """Asks jobs to save and end, where they do not see by themselves that the sweep is over."""


class _OfSubmitit:
    """What is the same of all of submitit's executors."""

    def returned(self, started: "Started") -> str | None:
        if not started.paths.result_pickle.exists():
            return None
        try:
            return started.result()
        except Exception:  # noqa: BLE001 (whatever submitit says of a job that returned nothing)
            return None


class Local(_OfSubmitit):
    """Processes on this machine, at most `slots` at once, among which its cores and GPUs are divided."""

    bound = True
    slots: int

    def __init__(self, directory: SweepDirectory, slots: int):
        self._directory = directory
        self.slots = slots

    def start(self, jobs: Sequence[tuple[str, Job]]) -> list["Started"]:
        import submitit

        started: list[Started] = []
        for name, job in jobs:
            executor = submitit.LocalExecutor(folder=self._directory.logs_path(name))
            executor.update_parameters(timeout_min=_FOREVER, stderr_to_stdout=True)
            # Ctrl-C in a terminal reaches every process; the job is told by the sweep, once
            with _deaf_to_ctrl_c():
                started.append(executor.submit(job))
        return started

    def share(self, slot: int) -> dict[str, Any]:
        return {
            "environ": tuple({**_gpu_share(slot, self.slots), **_programs()}.items()),
            "cores": _core_share(slot, self.slots),
        }

    def done(self, started: "Started") -> bool:
        return started.done()

    def queued(self, started: "Started") -> bool:
        return False

    def stop(self, started: Sequence["Started"]) -> None:
        pass  # they stop when the sweep's sign of life ends


@dataclasses.dataclass(frozen=True)
class SlurmOptions:
    """What each job asks of Slurm; None leaves it to the cluster."""

    partition: str | None = None
    gpus: int | None = None
    cpus: int | None = None
    memory_gb: int | None = None
    minutes: int = 24 * 60


class Slurm(_OfSubmitit):
    """Jobs of one Slurm array, at most `parallel` at once. They outlive the sweep's process, which finds them again."""

    bound = False
    slots: int | None = None  # Slurm itself bounds how many of an array run

    def __init__(self, directory: SweepDirectory, parallel: int, options: SlurmOptions):
        """Raises UsageError where there is no Slurm, or jobs would have no time."""
        if any(shutil.which(command) is None for command in _SLURM_COMMANDS):
            raise UsageError(
                f"--launcher=slurm needs Slurm's {', '.join(_SLURM_COMMANDS[:-1])} and {_SLURM_COMMANDS[-1]}, and they "
                "are not on the PATH; start the sweep on a login node of the cluster, or use --launcher=local"
            )
        if options.minutes < _LEAST_MINUTES:
            raise UsageError(
                f"--minutes={options.minutes} is too short: a job is warned {SECONDS_TO_SAVE} seconds before its end, "
                f"to save what it has; give at least {_LEAST_MINUTES}"
            )
        import submitit

        self._directory = directory
        self._queue = _SlurmQueue()
        self._minutes = options.minutes
        self._executor = submitit.SlurmExecutor(
            folder=directory.work_path / "slurm", max_num_timeout=_REQUEUES
        )
        wanted = {
            "partition": options.partition,
            "gpus_per_node": options.gpus,
            "cpus_per_task": options.cpus,
            "mem": None if options.memory_gb is None else f"{options.memory_gb}GB",
        }
        self._executor.update_parameters(
            job_name="headlab",
            time=options.minutes,
            signal_delay_s=SECONDS_TO_SAVE,
            nodes=1,
            ntasks_per_node=1,
            array_parallelism=parallel,
            stderr_to_stdout=True,
            **{key: value for key, value in wanted.items() if value is not None},
        )

    def start(self, jobs: Sequence[tuple[str, Job]]) -> list["Started"]:
        import submitit

        try:
            with self._executor.batch():
                started = [self._executor.submit(job) for _, job in jobs]
        except submitit.core.utils.FailedJobError as problem:
            raise HeadlabError(
                f"sbatch refused the jobs: {str(problem).strip().splitlines()[-1]}. Nothing was started; check "
                "--partition, --gpus, --cpus, --memory and --minutes."
            ) from problem
        return started

    def share(self, slot: int) -> dict[str, Any]:
        return {"minutes": self._minutes}  # Slurm gives each job its own cores and GPUs

    def found(self, job_id: str) -> "Started | None":
        """A job that an earlier call started; None if it is over."""
        import submitit

        job: Started = submitit.SlurmJob(self._directory.work_path / "slurm", job_id)
        over = self._queue.lacks(job) or self.returned(job) not in (None, INTERRUPTED)
        return None if over else job

    def done(self, started: "Started") -> bool:
        # submitit asks sacct, which clusters without accounting do not have
        if not started.paths.result_pickle.exists():
            return self._queue.has_lost(started)
        # what Slurm itself interrupted for another job, it starts again
        return self.returned(started) != INTERRUPTED or self._queue.lacks(started)

    def queued(self, started: "Started") -> bool:
        return self._queue.state(started) == "PD"

    def stop(self, started: Sequence["Started"]) -> None:
        for job in started:
            job.cancel(check=False)  # one that has just ended can't be


class _SlurmQueue:
    """What squeue says of this user's jobs. It is asked rarely, once for all of them."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}
        self._asked = float("-inf")
        self._answers = 0
        self._seen: dict[str, int] = {}  # the number of the last answer that had the job

    def state(self, started: "Started") -> str | None:
        """Slurm's code, as "PD" of a job that is pending; None of a job that isn't in the queue."""
        self._ask()
        return self._states.get(started.job_id)

    def lacks(self, started: "Started") -> bool:
        """Whether squeue has answered, without the job."""
        return self.state(started) is None and self._answers > 0

    def has_lost(self, started: "Started") -> bool:
        """Whether a job has left the queue, so long ago that what it wrote at its end has arrived here."""
        self._seen.setdefault(started.job_id, self._answers)
        self._ask()
        if self._answers - self._seen[started.job_id] < _ABSENT:
            return False
        os.listdir(started.paths.folder)  # a network's file system looks again
        return True

    def _ask(self) -> None:
        if time.monotonic() - self._asked < _ASK:
            return
        command = ["squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i %t"]
        try:
            answer = subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=60
            ).stdout
        except (subprocess.SubprocessError, OSError):
            return  # Slurm's controller is away for a while; its jobs are as they were
        finally:
            self._asked = time.monotonic()
        self._states = dict(line.split() for line in answer.splitlines() if line.strip())
        self._answers += 1
        self._seen |= dict.fromkeys(self._states, self._answers)


@contextlib.contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Processes started here ignore SIGINT until they say otherwise."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _programs() -> dict[str, str | None]:
    """Where this machine keeps compiled programs: points that differ in their seed alone compile once."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return {}
    return {"JAX_COMPILATION_CACHE_DIR": str(cache_dir() / "programs")}


def _core_share(slot: int, slots: int) -> tuple[int, ...] | None:
    if slots == 1 or not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    return tuple(cores[slot::slots]) or (cores[slot % len(cores)],)


def _gpu_share(slot: int, slots: int) -> dict[str, str | None]:
    """CUDA_VISIBLE_DEVICES of a slot, which submitit's local executor would set to none."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = (
        sorted(
            (match[1] for path in Path("/dev").glob("nvidia*") if (match := _GPU.match(path.name))),
            key=int,
        )
        if given is None
        else [part for part in given.split(",") if part]
    )
    if slots == 1 or not devices:
        return {"CUDA_VISIBLE_DEVICES": given}
    own = devices[slot::slots] or [devices[slot % len(devices)]]
    share: dict[str, str | None] = {"CUDA_VISIBLE_DEVICES": ",".join(own)}
    together = math.ceil(slots / len(devices))  # jobs that share a GPU share its memory
    if together > 1 and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        share["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.9 / together:.3f}"
    return share


_GPU = re.compile(r"nvidia(\d+)$")
