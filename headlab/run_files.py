"""The files of a run: its configuration, metrics, result and lock.

Nothing here starts JAX, so that reading the results of many runs is quick.
"""

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from headlab import config as configs
from headlab import files
from headlab.errors import HeadlabError, UsageError


class RunLocked(UsageError):
    """Another process holds the run for writing."""


class RunDirectory:
    """The files of one run. Making the object touches nothing: the paths need not exist."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.config_path = self.path / "config.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.result_path = self.path / "result.json"
        self.tokenizer_path = self.path / "tokenizer.json"
        self.checkpoints_dir = self.path / "checkpoints"
        self.events_dir = self.path / "events"
        self.lock_path = self.path / "lock"

    @classmethod
    def create_or_open(
        cls, path: str | os.PathLike[str], config: ConfigDict
    ) -> tuple["RunDirectory", dict[str, tuple[Any, Any]]]:
        """The run at `path`, made there when there is none, and the operational keys that differ.

        A new run records `config` in config.json. An existing one keeps the configuration it was
        made with; operational keys (mesh, logging, checkpoints, evaluation batch) may differ and
        come back as `{key: (recorded, given)}`, to be logged.

        Raises:
          UsageError: the run there has another configuration, or what is there is not a run.
        """
        run = cls(path)
        if not run.config_path.exists():
            run._create(config)
        recorded = run.config()
        differing = configs.differences(recorded, config)
        if differing:
            raise UsageError(
                f"{run.path} holds a run of another configuration: "
                f"{in_words(differing, 'what was asked')}. Choose another "
                "directory for the new configuration, or ask for the recorded values to resume."
            )
        return run, configs.differences(recorded, config, operational=True)

    def config(self) -> ConfigDict:
        """The configuration that the run was made with.

        Raises:
          UsageError: there is no run here, or its config.json is damaged.
        """
        return configs.from_json(self._config_text())

    def config_values(self) -> dict[str, Any]:
        """Every value of `config()` by dotted key, much faster.

        Raises:
          UsageError: there is no run here, or its config.json is damaged.
        """
        return configs.values_from_json(self._config_text())

    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl in order; [] when there are none.

        A torn last line, as a kill leaves it, is dropped.

        Raises:
          HeadlabError: a line before the last is not a record.
        """
        return [record for _, record in self._metric_lines()]

    def truncate_metrics(self, step: int) -> None:
        """Cut metrics.jsonl to the steps up to and including `step`, at once or not at all.

        The records that stay keep their bytes.

        Raises:
          HeadlabError: a line before the last is not a record.
        """
        if self.metrics_path.exists():
            kept = [line for line, record in self._metric_lines() if record["step"] <= step]
            files.replace(self.metrics_path, b"".join(line + b"\n" for line in kept))

    def result(self) -> dict[str, Any] | None:
        """What the finished run found, or None while it has not finished."""
        try:
            return json.loads(self.result_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as problem:
            raise HeadlabError(
                f"{self.result_path} is damaged ({problem}). Delete it and resume the run: it is "
                "written again at the end."
            ) from None

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write result.json, at once or not at all; a number that is not finite becomes null."""
        text = json.dumps(_finite_or_none(result), indent=2, allow_nan=False) + "\n"
        files.replace(self.result_path, text.encode())

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Hold the run for writing; the operating system lets go of it when the process dies.

        Raises:
          RunLocked: another process holds it; the message names that process.
        """
        return files.held(
            self.lock_path,
            lambda holder: RunLocked(
                f"{self.path} is being written by {holder}. Wait until it ends, stop it, or "
                "choose another directory."
            ),
        )

    def is_locked(self) -> bool:
        """Whether a process holds the run for writing."""
        try:
            with open(self.lock_path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except BlockingIOError:
            return True
        return False

    def wait_until_free(self) -> None:
        """Return when no process holds the run for writing."""
        with contextlib.suppress(FileNotFoundError), open(self.lock_path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)

    def _create(self, config: ConfigDict) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UsageError(
                f"{self.path} is a file, or below one. Choose a directory for the run."
            ) from None
        except OSError as problem:
            raise UsageError(
                f"{self.path} cannot be made ({problem.strerror}). Choose another directory."
            ) from None
        others = self.others()
        if others and not self.config_path.exists():
            raise UsageError(
                f"{self.path} is not empty and not a run: it holds {_listed(others)} but no "
                "config.json. Choose an empty or a new directory."
            )
        with self.lock():  # two processes that start at once must not both write
            if not self.config_path.exists():
                files.replace(self.config_path, configs.to_json(config).encode())

    def others(self) -> list[str]:
        """What the directory holds, if it is there, but for what a kill before config.json was whole may leave."""
        ours = {self.lock_path.name, files.temporary(self.config_path).name}
        found = self.path.iterdir() if self.path.is_dir() else ()
        return sorted({entry.name for entry in found} - ours)

    def _config_text(self) -> str:
        try:
            return self.config_path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            near = files.similar(self.path, is_run)
            hint = "" if near is None or near == self.path else f" Did you mean {near}?"
            raise UsageError(
                f"{self.path} is not a run: it has no config.json.{hint} Name a directory that "
                "`headlab train --workdir=…` wrote."
            ) from None
        except UnicodeDecodeError as problem:
            raise UsageError(
                f"{self.config_path} is not text ({problem}); restore it from a copy"
            ) from None

    def _metric_lines(self) -> list[tuple[bytes, dict[str, Any]]]:
        try:
            lines = self.metrics_path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                record["step"] + 0
            except (ValueError, TypeError, KeyError):
                if number == len(lines):  # empty after the last newline, or torn
                    break
                raise HeadlabError(
                    f"{self.metrics_path}, line {number}: not a record with a step: "
                    f"{line[:80].decode(errors='replace')!r}. Remove that line, or restore the "
                    "file from a copy."
                ) from None
            records.append((line, record))
        return records


def in_words(differing: Mapping[str, tuple[Any, Any]], asked: str) -> str:
    """What `config.differences` found between a run and what was `asked`, as part of a sentence.

    >>> in_words({"seed": (0, 1)}, "the sweep")
    'seed is 0 in the run and 1 in the sweep'
    """
    return "; ".join(
        f"{key} is {old!r} in the run and {new!r} in {asked}"
        for key, (old, new) in differing.items()
    )


def is_run(path: Path) -> bool:
    """Whether the directory is of a run, though its configuration may be lost."""
    return any((path / name).is_file() for name in ("config.json", "metrics.jsonl", "result.json"))


def phases_of(config: ConfigDict) -> list[tuple[str, int]]:
    """(head, step at which it ends) of each phase of a run: one, or two with late untying.

    The checkpoint at the end of a phase still is of that phase.
    """
    untied_at = configs.untie_step(config)
    last = (config.head.name, config.train.steps)
    return [last] if untied_at is None else [("tied", untied_at), ("untied", config.train.steps)]


def phase_at(config: ConfigDict, step: int) -> int:
    """The number of the phase that the checkpoint of `step` is of."""
    return next(i for i, (_, end) in enumerate(phases_of(config)) if step <= end)


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite_or_none(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite_or_none(inner) for inner in value]
    if hasattr(value, "tolist"):  # an array or scalar of NumPy or JAX
        return _finite_or_none(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
