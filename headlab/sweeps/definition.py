"""A sweep as its file defines it, and the plan that it comes to: a name and a resolved config for every point."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict, FrozenConfigDict

from headlab import config as configs
from headlab.errors import UsageError, nearest
from headlab.sweeps.names import names
from headlab.sweeps.points import Points


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What `get_sweep()` of a sweep file returns.

    Attributes:
      base: a config file, "FILE.py" or "FILE.py:TEXT", relative to the working directory, or to the sweep file or a
        folder above it.
      points: the points, or a function that makes them from the base config, for points that depend on it; see
        `config_of`.
      question: what the sweep is to answer.
      baseline: options that tell the points which the others are compared with, such as {"head.name": "tied"}.
      overrides: options that all points share, by dotted key.
    """

    base: str
    points: Points | Callable[[FrozenConfigDict], Points]
    question: str
    baseline: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class PlannedPoint(NamedTuple):
    """A point of a plan; its run directory is WORKDIR/name."""

    name: str
    overrides: Mapping[str, Any]
    config: FrozenConfigDict


class Plan(NamedTuple):
    """A sweep ready to be run."""

    file: str  # as it was given, FILE.py or FILE.py:TEXT
    sweep: Sweep
    overrides: Mapping[str, str]  # of the command line, for all points
    points: tuple[PlannedPoint, ...]

    @property
    def keys(self) -> list[str]:
        """The options that points set, in the order of their first appearance."""
        return list(dict.fromkeys(key for point in self.points for key in point.overrides))


def plan(path: str | Path, overrides: Sequence[tuple[str, str]] = ()) -> Plan:
    """The plan of a sweep file, "FILE.py" or "FILE.py:TEXT", all of whose points are resolved and checked.

    `overrides` are (key, text) pairs that apply to every point.

    Raises:
      UsageError: the file or its base cannot be read or fails; there is no point, or two of one name or one config; a
        point's config is not valid; an override is of an option that points set; no point is the baseline.
    """
    sweep = configs.call_in_file(
        str(path),
        "get_sweep",
        returns=Sweep,
        what="sweep file",
        example="configs/sweeps/head_zoo.py",
        fix='a headlab.sweeps.Sweep(base="configs/micro.py", points=…, question="…")',
    )
    base = configs.read(_base_path(sweep.base, Path(str(path).partition(".py:")[0])))
    configs.put(base, sweep.overrides)
    for key, text in sorted(overrides, key=lambda pair: pair[0] != "head.name"):
        configs.override(base, key, text)
    points = _points(sweep, FrozenConfigDict(base), str(path))
    _refuse_overridden(points, dict(overrides))
    planned = tuple(
        PlannedPoint(name, point, _named(name, base, point))
        for name, point in zip(names(points), points, strict=True)
    )
    _refuse_doubles(planned)
    _check_baseline(sweep.baseline, points)
    return Plan(str(path), sweep, dict(overrides), planned)


def config_of(base: ConfigDict, point: Mapping[str, Any]) -> FrozenConfigDict:
    """The resolved config of a point over a base config that isn't resolved.

    Raises UsageError for an option or a value that cannot be.
    """
    config = configs.copy(base)
    configs.put(config, point)
    return configs.resolve(config)


def words(text: str, *known: str) -> set[str]:
    """The words of "tiny,flops", the TEXT of a sweep file FILE.py:TEXT.

    Raises UsageError for a word that is not known, naming the nearest.

    >>> sorted(words("tiny,flops", "tiny", "flops", "matched"))
    ['flops', 'tiny']
    """
    given = {word.strip() for word in text.split(",") if word.strip()}
    for word in sorted(given - set(known)):
        raise UsageError(
            f"the sweep has no variant {word!r}; did you mean {nearest(word, known)!r}? After FILE.py: it takes "
            f"{', '.join(known)}"
        )
    return given


def _base_path(base: str, sweep_file: Path) -> str:
    """The base config file where it is found, with its ":TEXT"."""
    file, colon, text = base.partition(".py:")
    file = file + ".py" if colon else file
    folders = [Path(), *sweep_file.absolute().parents]
    for folder in folders:
        if (folder / file).is_file():
            return str(folder / file) + (f":{text}" if colon else "")
    raise UsageError(
        f"the base config {file} of the sweep {sweep_file} is neither in {Path.cwd()} nor beside the sweep file or "
        "above it; correct Sweep(base=…), or run the command from the root of the clone"
    )


def _points(sweep: Sweep, base: FrozenConfigDict, path: str) -> Points:
    points = sweep.points(base) if callable(sweep.points) else sweep.points
    if not points:
        raise UsageError(
            f"the sweep {path} has no points; give Sweep(points=values(…)), and look at its where(…)"
        )
    return tuple(points)


def _named(name: str, base: ConfigDict, point: Mapping[str, Any]) -> FrozenConfigDict:
    try:
        return config_of(base, point)
    except UsageError as problem:
        raise UsageError(f"the point {name}: {problem}") from problem


def _refuse_overridden(points: Points, overrides: Mapping[str, str]) -> None:
    for key in overrides:
        if any(key in point for point in points):
            raise UsageError(
                f"--config.{key}={overrides[key]} is for every point, but the points of the sweep set {key} "
                "themselves; leave it away, or change the sweep file"
            )


def _refuse_doubles(planned: Sequence[PlannedPoint]) -> None:
    by_name: dict[str, PlannedPoint] = {}
    by_hash: dict[str, PlannedPoint] = {}
    for point in planned:
        if (same := by_name.setdefault(point.name, point)) is not point:
            raise UsageError(
                f"two points have the name {point.name}: {dict(same.overrides)} and {dict(point.overrides)}; remove one"
                " of them, or set values that differ in letters and digits"
            )
        key = configs.config_hash(point.config)
        if (same := by_hash.setdefault(key, point)) is not point:
            raise UsageError(
                f"the points {same.name} and {point.name} have the same configuration, so that one run would stand for"
                " two; remove one of them"
            )


def _check_baseline(baseline: Mapping[str, Any], points: Points) -> None:
    if not any(all(point.get(key) == value for key, value in baseline.items()) for point in points):
        raise UsageError(
            f"no point of the sweep is its baseline, {dict(baseline)}; Sweep(baseline=…) must hold values that at "
            "least one point sets"
        )
