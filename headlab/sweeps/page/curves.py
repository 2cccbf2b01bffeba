"""Loss curves small enough for a page: points that a reader could see are kept."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from headlab.sweeps.results import Run

FIRST_KEPT = 100  # points at the start that always stay, for a logarithmic axis spreads them out
_ALL_RUNS = 50_000  # points of training curves on one page
_FEWEST, _MOST = 300, 1000  # points of one run
DIGITS = 4  # after the point, as they are read


def points_per_run(runs: int) -> int:
    """How many points of its training curve a run may have on a page of so many runs."""
    return min(max(_ALL_RUNS // max(runs, 1), _FEWEST), _MOST)


def curve(run: Run, key: str) -> tuple[Int[np.ndarray, "n"], Float[np.ndarray, "n"]]:
    """(steps, values) of a metric, without the points that are not finite numbers."""
    points = [(r["step"], r[key]) for r in run.metrics if isinstance(r.get(key), int | float)]
    steps = np.array([step for step, _ in points], np.int64)
    values = np.array([value for _, value in points], np.float64)
    finite = np.isfinite(values)
    return steps[finite], values[finite]


def thinned(
    steps: Int[np.ndarray, "n"], values: Float[np.ndarray, "n"], limit: int
) -> tuple[Int[np.ndarray, "m"], Float[np.ndarray, "m"]]:
    """At most `limit` of the points: the first ones, then the lowest and the highest of equal stretches, and the last.

    A stretch is drawn narrower than a line is wide, so that the picture stays the same.
    """
    if len(steps) <= limit:
        return steps, values
    first = min(FIRST_KEPT, limit // 3)
    edges = np.linspace(first, len(steps), (limit - first - 1) // 2 + 1).astype(int)
    kept = [*range(first), len(steps) - 1]
    for low, high in itertools.pairwise(edges):
        kept += [low + int(np.argmin(values[low:high])), low + int(np.argmax(values[low:high]))]
    chosen = np.unique(kept)
    return steps[chosen], values[chosen]


def curve_data(run: Run, limit: int) -> dict[str, Any]:
    """The training curve (thinned) and the held-out curve (whole) of a run, as lists of steps and losses."""
    training = thinned(*curve(run, "train/loss"), limit)
    held_out = curve(run, "validation/loss")
    return {"train": _rounded(*training), "heldOut": _rounded(*held_out)}


def is_thinned(runs: Sequence[Run], limit: int) -> bool:
    """Whether the training curve of any run has more points than a page shows."""
    return any(len(curve(run, "train/loss")[0]) > limit for run in runs)


def _rounded(steps: Any, values: Any) -> list[list[float]]:
    return [steps.tolist(), [round(value, DIGITS) for value in values.tolist()]]
