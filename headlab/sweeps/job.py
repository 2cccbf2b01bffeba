"""What a process of a sweep does: it trains one point, or one group of points that are stacked.

Nothing heavy is imported before the environment is as the job wants it.
"""

import dataclasses
import fcntl
import os
import signal
import threading
import traceback
from typing import Any

from headlab import config as configs
from headlab.errors import HeadlabError
from headlab.sweeps.directory import SweepDirectory

INTERRUPTED = "interrupted"


@dataclasses.dataclass(frozen=True)
class Job:
    """A picklable function without arguments.

    Attributes:
      workdir: the directory of the sweep.
      configs: the name and the resolved config, as JSON, of each point; several are trained as one stacked program.
      alive: a file that the sweep holds locked while it lives; the job stops when it lets go. None: it outlives it.
      environ: variables to set, or with None to remove, before JAX is imported.
      cores: the processor cores to run on; None: all.
    """

    workdir: str
    configs: tuple[tuple[str, str], ...]
    alive: str | None = None
    environ: tuple[tuple[str, str | None], ...] = ()
    cores: tuple[int, ...] | None = None

    def __call__(self) -> str:
        """Trains, and returns "ended", "interrupted" or "failed"; failures are recorded in the sweep's directory."""
        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, _interrupt)
        directory = SweepDirectory(self.workdir)
        try:
            self._set_up()
            self._train(directory)
            return "ended"
        except KeyboardInterrupt:
            return INTERRUPTED  # told to stop before there was anything to save
        except Exception as error:  # noqa: BLE001 (whatever it is, the other points go on)
            if _is_interruption(error):
                return INTERRUPTED
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
