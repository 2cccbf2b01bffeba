"""How large a model of a config is and what training it costs, by the model's own count; and configs that match.

Sizes are counted on shapes: no array is made.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from ml_collections import FrozenConfigDict

from headlab import config as configs
from headlab import models
from headlab.errors import UsageError
from headlab.sweeps.definition import PlannedPoint

Measure = Literal["parameters", "flops"]


def size(config: FrozenConfigDict, token_counts: np.ndarray | None = None) -> models.Budget:
    """The size of the model of a resolved config over `data.vocab_size` tokens; see `headlab.models.budget`."""
    return models.budget(config, config.data.vocab_size, token_counts)


def parameters(points: Sequence[PlannedPoint]) -> list[int | None]:
    """The parameters of the model of each point; None where an option is "auto", which only the corpus can tell.

    Raises UsageError where the head of a point refuses an option.
    """
    found: list[int | None] = []
    for point in points:
        try:
            open_options = "auto" in point.config.head.values()
            found.append(None if open_options else size(point.config).parameters)
        except UsageError as problem:
            raise UsageError(f"the point {point.name}: {problem}") from problem
    return found


def match(
    config: FrozenConfigDict,
    key: str,
    target: float,
    measure: Measure,
    *,
    tolerance: float,
    step: int = 1,
    token_counts: np.ndarray | None = None,
) -> int:
    """The value of a whole-number option, a multiple of `step`, that brings a model's size nearest to `target`.

    The size must grow with the option.

    Args:
      config: resolved; what the value is put into.
      key: the option's dotted key, such as "model.d_mlp".
      target: parameters, or operations a token of a training step.
      tolerance: how far from the target the size may be, as a share of it.

    Raises:
      UsageError: no value comes so near.
    """

    @functools.cache
    def at(units: int) -> float:
        changed = configs.replace(config, {key: units * step})
        found = size(changed, token_counts)
        return found.parameters if measure == "parameters" else found.flops

    units = _crossing(at, max(int(configs.flatten(config)[key]) // step, 1), target)
    off = abs(at(units) - target) / target
    if off > tolerance:
        raise UsageError(
            f"no {key} brings the head {config.head.name!r} to {target:,.0f} {measure}: {units * step} gives "
            f"{at(units):,.0f}, {off:.2%} off, and the tolerance is {tolerance:.2%}; leave the head out, or "
            "change what it is matched by"
        )
    return units * step


def _crossing(at: Callable[[int], float], start: int, target: float) -> int:
    """The number of at least 1 whose value is nearest to the target; values ascend.

    An interval around the target is made smaller by a straight line through its ends, and by halves where that is slow.
    """
    low, high = 1, max(start, 2)
    if at(low) >= target:
        return low
    while at(high) < target:
        low, high = high, 2 * high
    halve = False
    while high - low > 1:
        share = 0.5 if halve else (target - at(low)) / (at(high) - at(low))
        middle = min(max(low + round(share * (high - low)), low + 1), high - 1)
        halve = not halve and middle not in (low + 1, high - 1)
        low, high = (middle, high) if at(middle) < target else (low, middle)
    return min((low, high), key=lambda units: abs(at(units) - target))
