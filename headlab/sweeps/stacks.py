"""Which points of a sweep are trained together, as one program mapped over their states."""

from collections.abc import Callable, Sequence

from headlab import config as configs
from headlab.errors import UsageError
from headlab.sweeps.definition import PlannedPoint
from headlab.training.stacking import STACKED_KEYS, why_not

Group = tuple[PlannedPoint, ...]


def stacks(
    points: Sequence[PlannedPoint], saved: Callable[[PlannedPoint], set[int]]
) -> tuple[list[Group], list[str]]:
    """The points in groups, in order, and a line about each point that cannot be in one and why.

    Points of a group differ in their seed and peak rate alone. Those that have begun are grouped with others only where
    all have a step in common from which they can go on.

    Args:
      saved: the steps of which a point has checkpoints.

    Raises:
      UsageError: no point can be stacked.
    """
    groups: dict[str, list[PlannedPoint]] = {}
    alone: list[str] = []
    reasons: list[str] = []
    for point in points:
        reason = why_not(point.config)
        key = repr(sorted(_shared(point).items()))
        if reason is not None:
            key = point.name
            alone.append(f"{point.name} is trained by itself: {reason}")
            reasons.append(reason)
        groups.setdefault(key, []).append(point)
    if points and len(reasons) == len(points):
        raise UsageError(f"--vectorized can stack no point of this sweep: {reasons[0]}")
    return [part for group in groups.values() for part in _by_progress(group, saved)], alone


def _shared(point: PlannedPoint) -> dict[str, object]:
    """The options that stacked points have in common."""
    return {k: v for k, v in configs.flatten(point.config).items() if k not in STACKED_KEYS}


def _by_progress(
    group: Sequence[PlannedPoint], saved: Callable[[PlannedPoint], set[int]]
) -> list[Group]:
    fresh = [point for point in group if not saved(point)]
    begun = [point for point in group if saved(point)]
    common = begun and set.intersection(*map(saved, begun))
    parts = [begun] if common else [[point] for point in begun]
    return [tuple(part) for part in (*parts, fresh) if part]
