"""The directory of a sweep: a run directory for each point, `sweep.json`, and `sweep/` with logs and failures.

`sweep.json` says what the sweep is, so that its results can be read without the file that defined it. Failures lie
beside the run directories, not in them.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headlab import config as configs
from headlab import files
from headlab.config.record import is_operational
from headlab.errors import UsageError
from headlab.sweeps.definition import Plan

FORMAT = 1  # grows with the meaning of sweep.json


class SignOfLife(NamedTuple):
    """What the processes of a sweep watch: they stop when `path` isn't locked any more."""

    path: str
    end: Callable[[], None]


class SweepDirectory:
    """The files of one sweep. Making the object touches nothing."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.record_path = self.path / "sweep.json"
        self.work_path = self.path / "sweep"

    def run_path(self, name: str) -> Path:
        """The run directory of a point."""
        return self.path / name

    def logs_path(self, name: str) -> Path:
        """Where the logs of a point are."""
        return self.work_path / name

    def record(self) -> dict[str, Any] | None:
        """What sweep.json holds, or None where there is no sweep.

        Raises UsageError where it is not a record that this version reads.
        """
        try:
            record = json.loads(self.record_path.read_text(encoding="utf-8"))
            known = record["format"] <= FORMAT
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, KeyError, TypeError) as problem:
            raise UsageError(
                f"{self.record_path} is damaged ({problem!r}); restore it from a copy, or choose another --workdir"
            ) from None
        if not known:
            raise UsageError(
                f"{self.record_path} has format {record['format']}, and this headlab reads up to {FORMAT}; use a newer "
                "headlab"
            )
        return record

    def check(self, plan: Plan) -> Plan:
        """`plan` with the names under which its points are recorded here; writes nothing.

        The sweep may have more points than were recorded, or fewer.

        Raises:
          UsageError: another sweep is here, or something else is, or a recorded point would have another config.
        """
        record = self.record()
        if record is None:
            self._refuse_other_content()
            return plan
        given, there = _identity(plan.file), _identity(record["sweep"])
        if given != there:
            raise UsageError(
                f"{self.path} holds the sweep {record['sweep']}, not {plan.file}; choose another --workdir"
            )
        recorded = {point["name"]: point for point in record["points"]}
        by_hash = {point["config_hash"]: name for name, point in recorded.items()}
        points = []
        for point in plan.points:
            name = by_hash.get(configs.config_hash(point.config), point.name)
            if name in recorded and by_hash.get(configs.config_hash(point.config)) != name:
                raise self._changed(name, record, recorded[name], configs.flatten(point.config))
            points.append(point._replace(name=name))
        return plan._replace(points=tuple(points))

    def write(self, plan: Plan, command: Sequence[str]) -> None:
        """Writes sweep.json for a plan that `check` returned; points of earlier calls stay in it."""
        before = self.record() or {"points": [], "config": {}}
        names = {point.name for point in plan.points}
        points = [
            {
                "name": point.name,
                "overrides": dict(point.overrides),
                "config_hash": configs.config_hash(point.config),
                "config": json.loads(json.dumps(configs.flatten(point.config))),
            }
            for point in plan.points
        ] + [
            {**point, "config": {**before["config"], **point["config"]}}
            for point in before["points"]
            if point["name"] not in names
        ]
        shared = {
            key: value
            for key, value in points[0]["config"].items()
            if all(key in other["config"] and other["config"][key] == value for other in points)
        }
        for point in points:
            point["config"] = {k: v for k, v in point["config"].items() if k not in shared}
        file = Path(plan.file.partition(".py:")[0] + (".py" if ".py:" in plan.file else ""))
        record = {
            "format": FORMAT,
            "sweep": plan.file,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            "question": plan.sweep.question,
            "command": list(command),
            "base": plan.sweep.base,
            "overrides": {**plan.sweep.overrides, **plan.overrides},
            "baseline": dict(plan.sweep.baseline),
            "keys": list(dict.fromkeys(key for point in points for key in point["overrides"])),
            "points": points,
            "config": shared,
        }
        self.work_path.mkdir(parents=True, exist_ok=True)
        write_json(self.record_path, record)

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Hold the sweep, so that no other process runs it; the operating system lets go when the process dies.

        Raises:
          UsageError: another process runs the sweep.
        """
        self.work_path.mkdir(parents=True, exist_ok=True)
        return files.held(
            self.work_path / "lock",
            lambda holder: UsageError(
                f"the sweep in {self.path} is being run by {holder}. Wait until it ends, stop it, or choose "
                "another --workdir."
            ),
        )

    @contextlib.contextmanager
    def sign_of_life(self) -> Iterator["SignOfLife"]:
        """A file that is locked until this process ends, or says so; to be used by the one that holds the sweep."""
        for left_over in self.work_path.glob("alive-*"):
            left_over.unlink(missing_ok=True)
        # a file of its own: a process of an earlier call must not take this call for its own
        path = self.work_path / f"alive-{os.getpid()}-{os.urandom(4).hex()}"
        try:
            with open(path, "w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield SignOfLife(str(path), file.close)
        finally:
            path.unlink(missing_ok=True)

    def failure(self, name: str) -> dict[str, Any] | None:
        """What is recorded of the failure of a point: "kind", "error", "traceback"; None if it has not."""
        try:
            return json.loads((self.logs_path(name) / "error.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError:
            return {"kind": "unknown", "error": "error.json is damaged", "traceback": ""}

    def write_failure(self, name: str, failure: Mapping[str, Any]) -> None:
        """Records that a point failed."""
        write_json(self.logs_path(name) / "error.json", failure)

    def forget_failure(self, name: str) -> None:
        """Removes the record of a failure."""
        (self.logs_path(name) / "error.json").unlink(missing_ok=True)

    def clear_jobs(self, name: str) -> None:
        """Removes what submitit keeps of a point's earlier jobs, but for the logs."""
        for pickled in self.logs_path(name).glob("*.pkl"):
            pickled.unlink(missing_ok=True)

    def _refuse_other_content(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path} is a file. Choose a directory for the sweep.")
        found = sorted(entry.name for entry in self.path.iterdir()) if self.path.is_dir() else []
        if "config.json" in found:
            raise UsageError(f"{self.path} is a run, not a sweep. Choose another --workdir.")
        # what a kill before sweep.json was whole may leave does not count
        ours = (self.work_path.name, files.temporary(self.record_path).name)
        others = [name for name in found if name not in ours]
        if others:
            raise UsageError(
                f"{self.path} is not empty and not a sweep: it holds {', '.join(others[:5])} but no sweep.json. Choose "
                "an empty or a new --workdir."
            )

    def _changed(
        self, name: str, record: Mapping, recorded: Mapping, values: Mapping
    ) -> UsageError:
        before = {**record["config"], **recorded["config"]}
        now = json.loads(json.dumps(values))
        changed = {
            key: (before.get(key, configs.ABSENT), now.get(key, configs.ABSENT))
            for key in sorted(before | now)
            if before.get(key, configs.ABSENT) != now.get(key, configs.ABSENT)
            and not is_operational(key)
        }
        listed = "; ".join(
            f"{key} was {old!r} and is now {new!r}" for key, (old, new) in changed.items()
        )
        return UsageError(
            f"the point {name} of the sweep in {self.path} has changed: {listed}. Points can be added, not changed: "
            "choose another --workdir for the new ones, or ask for the recorded values to go on."
        )


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file at once or not at all, and makes its folder where there is none.

    Raises HeadlabError where it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    files.replace(path, text.encode())


def _identity(file: str) -> str:
    """What names a sweep: its file's name and the TEXT, wherever the file lies."""
    return file.replace(os.sep, "/").rpartition("/")[2]
