"""What a process of a sweep does: it trains one point, or one group of points that are stacked.

Nothing heavy is imported before the environment is as the job wants it.
"""

import dataclasses
import fcntl
import os
import signal
import threading
import time
import traceback
from typing import Any

from headlab import config as configs
from headlab.errors import HeadlabError
from headlab.sweeps.directory import SweepDirectory

INTERRUPTED = "interrupted"

#: How long before its end a cluster warns a job.
SECONDS_TO_SAVE = 90


@dataclasses.dataclass(frozen=True)
class Job:
    """A picklable function without arguments.

    Attributes:
      workdir: the directory of the sweep.
      configs: the name and the resolved config, as JSON, of each point; several are trained as one stacked program.
      alive: a file that the sweep holds locked while it lives; the job stops when it lets go. None: it outlives it.
      environ: variables to set, or with None to remove, before JAX is imported.
      cores: the processor cores to run on; None: all.
      minutes: how long the cluster lets the job run, before it is given back and goes on later; None: for ever.
    """

    workdir: str
    configs: tuple[tuple[str, str], ...]
    alive: str | None = None
    environ: tuple[tuple[str, str | None], ...] = ()
    cores: tuple[int, ...] | None = None
    minutes: int | None = None

    def __call__(self) -> str:
        """Trains, and returns "ended", "interrupted" or "failed"; failures are recorded in the sweep's directory.

        A job whose time is up doesn't return: it saves, and gives itself back to the cluster.
        """
        began = time.monotonic()
        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, _interrupt)
        requeue = _Requeue()
        directory = SweepDirectory(self.workdir)
        try:
            self._set_up()
            before = self._saved(directory)
            if self._trains_to_the_end(directory):
                return "ended"
            if requeue.asked:
                self._check_progress(directory, before, time.monotonic() - began)
                requeue.now()
            return INTERRUPTED
        except KeyboardInterrupt:
            return INTERRUPTED  # told to stop before there was anything to save
        except Exception as error:  # noqa: BLE001 (whatever it is, the other points go on)
            failure = _described(error)
            for name, _ in self.configs:
                directory.write_failure(name, failure)
            return "failed"

    def checkpoint(self) -> Any:
        """What submitit is to start in place of a job that a cluster stops: the same, which resumes its run."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def _set_up(self) -> None:
        for name, value in self.environ:
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self.cores is not None:
            os.sched_setaffinity(0, self.cores)
        if self.alive is not None:
            threading.Thread(target=_stop_when_free, args=(self.alive,), daemon=True).start()

    def _saved(self, directory: SweepDirectory) -> list[set[int]]:
        """The steps at which each run has a checkpoint."""
        from headlab.checkpoint_files import saved_checkpoints
        from headlab.runs import RunDirectory

        runs = [RunDirectory(directory.run_path(name)) for name, _ in self.configs]
        return [set(saved_checkpoints(run.checkpoints_dir)) for run in runs]

    def _check_progress(
        self, directory: SweepDirectory, before: list[set[int]], seconds: float
    ) -> None:
        """Raises HeadlabError where all the time that a cluster gives brought nothing: it never would."""
        time_is_up = self.minutes is not None and seconds >= 60 * self.minutes - 2 * SECONDS_TO_SAVE
        if time_is_up and self._saved(directory) == before:
            raise HeadlabError(
                f"the {self.minutes} minutes that the cluster gives a job ended before a step could be saved; give it "
                "more with --minutes, and try again with --retry"
            )

    def _trains_to_the_end(self, directory: SweepDirectory) -> bool:
        """Trains; False where a signal asked it to stop."""
        try:
            self._train(directory)
        except KeyboardInterrupt:
            return False
        except Exception as error:
            if _is_interruption(error):
                return False
            raise
        return True

    def _train(self, directory: SweepDirectory) -> None:
        from headlab import training
        from headlab.runs import RunDirectory, RunLocked

        names = {str(directory.run_path(name)): name for name, _ in self.configs}
        runs = [
            (configs.from_json(text), path)
            for path, (_, text) in zip(names, self.configs, strict=True)
        ]
        while True:
            for path in names:
                RunDirectory(path).wait_until_free()
            try:
                if len(runs) == 1:
                    training.train(*runs[0])
                    return
                _, failures = training.train_stacked(runs)
                for path, error in failures.items():
                    directory.write_failure(names[path], _described(error))
                return
            except RunLocked:
                continue  # another process was quicker


class _Requeue:
    """What a cluster's warning does, that a job's time is up or that another job takes its place.

    submitit would start the job again from the latest checkpoint; this one first saves where it is.
    """

    def __init__(self) -> None:
        self._number = getattr(signal, f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}")
        self._submitits = signal.getsignal(self._number)
        self.asked = False
        if callable(self._submitits):
            signal.signal(self._number, self._ask)

    def _ask(self, number: int, frame: Any) -> None:
        if not self.asked:
            self.asked = True
            signal.raise_signal(signal.SIGTERM)

    def now(self) -> None:
        """Gives the job back to the cluster and ends this process."""
        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, signal.SIG_IGN)  # the cluster sends one to what it takes back
        assert callable(self._submitits)
        self._submitits(self._number, None)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _stop_when_free(path: str) -> None:
    """Asks this process to stop when nobody holds the file locked any more."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        pass  # it is gone already
    os.kill(os.getpid(), signal.SIGTERM)


def _is_interruption(error: Exception) -> bool:
    from headlab.training import Interrupted

    return isinstance(error, Interrupted)


def _described(error: Exception) -> dict[str, str]:
    known = isinstance(error, HeadlabError)
    return {
        "kind": type(error).__name__,
        "error": str(error) if known else f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
    }
