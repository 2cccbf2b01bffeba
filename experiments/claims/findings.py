"""What a claim came to, and the rules that turn figures into a verdict."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from headlab.sweeps.comparison import paired_difference

HOLDS, FAILS, DEPENDS = "holds", "does not hold", "depends"
VERDICTS = (HOLDS, FAILS, DEPENDS)
ROUND_NUMBER = (
    0.1  # how far, as a share of it, a figure may be from a round number that a claim names
)


class Finding(NamedTuple):
    """The figures of a claim, what its rule makes of them, and both in words."""

    figures: dict[str, Any]  # for JSON
    verdict: str
    found: str  # a sentence with the figures


class Interval(NamedTuple):
    """A mean over seeds with its 95% interval (Student's t)."""

    mean: float
    low: float
    high: float

    def text(self, form: str = "+.4f") -> str:
        """The three numbers, each in a format such as "+.3f"."""
        return f"{self.mean:{form}} ({self.low:{form}} to {self.high:{form}})"


def interval(values: Mapping[int, float], baseline: Mapping[int, float] | None = None) -> Interval:
    """The interval of values by seed, or of what they are above a baseline, paired by seed; two seeds at least."""
    against = dict.fromkeys(values, 0.0) if baseline is None else baseline
    mean, low, high = paired_difference(values, against)
    if low is None or high is None:
        raise ValueError(f"an interval needs at least two seeds; these are of {sorted(values)}")
    return Interval(mean, low, high)


def yes(condition: bool) -> str:
    """`holds`, or `does not hold`."""
    return HOLDS if condition else FAILS


def above(found: Interval, limit: float) -> str:
    """`holds` where the whole interval is above the limit, `does not hold` where none of it is, else `depends`."""
    return HOLDS if found.low > limit else FAILS if found.high <= limit else DEPENDS


def at_most(found: Interval, limit: float) -> str:
    """`holds` where no part of the interval is above the limit, `does not hold` where all of it is, else `depends`."""
    return {HOLDS: FAILS, FAILS: HOLDS, DEPENDS: DEPENDS}[above(found, limit)]


def between(found: Interval, low: float, high: float) -> str:
    """`holds` where the whole interval lies in [low, high], `does not hold` where none of it does, else `depends`."""
    if low <= found.low and found.high <= high:
        return HOLDS
    return FAILS if found.high < low or found.low > high else DEPENDS


def near(value: float, claimed: float) -> str:
    """Whether a figure is within 10% of the round number that a claim names."""
    return yes(abs(value - claimed) <= ROUND_NUMBER * claimed)


def together(verdicts: Iterable[str]) -> str:
    """The verdict of a claim with several parts, or by several countings: theirs where they agree, else `depends`."""
    different = set(verdicts)
    return different.pop() if len(different) == 1 else DEPENDS


def listed(values: Sequence[str]) -> str:
    """
    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join(filter(None, [", ".join(values[:-1]), values[-1]]))
