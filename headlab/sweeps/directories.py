"""Which directories are runs, what they are called, and what sweep.json says of them."""

import collections
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headlab import files
from headlab.errors import UsageError
from headlab.run_files import is_run

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


class Problem(NamedTuple):
    """A run that is left out, or that never began."""

    name: str
    path: str
    reason: str


def run_directories(
    given: Paths,
) -> tuple[list[Path], list[Problem], dict[Path, dict[str, Any]]]:
    """(directories of runs, each once; points without a run; sweep.json by work directory)."""
    found: dict[Path, Path] = {}
    not_started: list[Problem] = []
    sweeps: dict[Path, dict[str, Any]] = {}
    for path in map(Path, [given] if isinstance(given, str | os.PathLike) else given):
        if is_run(path):
            found.setdefault(path.resolve(), path)
            continue
        inner = sorted(filter(is_run, path.iterdir()), key=_natural) if path.is_dir() else []
        sweep = sweep_record(path)
        if not inner and sweep is None:
            near = None if path.exists() else files.similar(path, Path.is_dir)
            hint = "" if near is None else f" Did you mean {near}?"
            raise UsageError(
                f"{path} is no run and holds none: there is no config.json in it or in a directory "
                f"right below it.{hint} Name a directory that `headlab train` or `headlab sweep` wrote."
            )
        points = [point["name"] for point in (sweep or {}).get("points", [])]
        order = {name: number for number, name in enumerate(points)}
        inner.sort(key=lambda run: order.get(run.name, len(order)))
        found.update((run.resolve(), run) for run in inner if run.resolve() not in found)
        if sweep is not None:
            sweeps[path] = sweep
            missing = [path / name for name in points if not is_run(path / name)]
            not_started += [
                Problem(run.name, str(run), failure_of(run) or "not started") for run in missing
            ]
    return list(found.values()), not_started, sweeps


def failure_of(run: Path) -> str | None:
    """What a sweep recorded of the failure of a run, or None: sweep/NAME/error.json beside the run."""
    try:
        record = json.loads((run.parent / "sweep" / run.name / "error.json").read_text("utf-8"))
        return str(record["error"])
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, OSError) as problem:
        return f"it failed, and the record of it cannot be read ({problem})"


def sweep_record(path: Path) -> dict[str, Any] | None:
    """The content of sweep.json, None where there is none; {"damaged": reason} where it cannot be read."""
    try:
        content = json.loads((path / "sweep.json").read_text(encoding="utf-8"))
        points = content.get("points", [])
        if all(isinstance(point["name"], str) for point in points):
            return content
        reason = "a point has no name"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, AttributeError, TypeError, KeyError, OSError) as problem:
        reason = f"{type(problem).__name__}: {problem}"
    return {"damaged": f"it cannot be read ({reason}); its question and baseline are not used"}


def _natural(path: Path) -> list[tuple[int, int | str]]:
    """A key by which run2 comes before run10."""
    parts = re.split(r"(\d+)", path.name)
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts]


def names_of(paths: Sequence[Path]) -> list[str]:
    """The directory's own name, or with as many of its parents as tell it from the others."""
    parts = [path.resolve().parts for path in paths]
    depths = [1] * len(paths)
    while True:
        names = ["/".join(part[-depth:]) for part, depth in zip(parts, depths, strict=True)]
        counts = collections.Counter(names)
        if max(counts.values(), default=1) == 1:
            return names
        depths = [d + (counts[name] > 1) for d, name in zip(depths, names, strict=True)]
