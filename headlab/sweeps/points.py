"""Points of a sweep, and what combines them: each point is the options it sets, by dotted key.

A set of points is a tuple; `values` and `points` make one, `product`, `zip`, `chain`, `where` and `sort` make others.
"""

import builtins
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from headlab.errors import UsageError

Point = Mapping[str, Any]
Points = tuple[Point, ...]


def values(key: str, choices: Iterable[Any]) -> Points:
    """A point for each value of one option.

    >>> values("seed", range(2))
    ({'seed': 0}, {'seed': 1})
    """
    return tuple({key: choice} for choice in choices)


def points(*each: Point) -> Points:
    """These points.

    >>> points({"head.name": "tied"}, {"head.name": "untied", "model.d_mlp": 64})
    ({'head.name': 'tied'}, {'head.name': 'untied', 'model.d_mlp': 64})
    """
    return tuple(dict(point) for point in each)


def product(*factors: Points) -> Points:
    """Every combination of a point from each, the last varying fastest.

    Raises UsageError where two of them set the same option.

    >>> product(values("head.name", ["tied", "untied"]), values("seed", [0, 1]))[1]
    {'head.name': 'tied', 'seed': 1}
    """
    return tuple(_joined(combination) for combination in itertools.product(*factors))


def zip(*together: Points) -> Points:
    """The first points of all in one, then the second, and so on.

    Raises UsageError where they are not equally many, or two of them set the same option.

    >>> zip(values("model.d_model", [32, 64]), values("optimizer.peak_rate", [0.01, 0.005]))[1]
    {'model.d_model': 64, 'optimizer.peak_rate': 0.005}
    """
    lengths = [len(each) for each in together]
    if len(set(lengths)) > 1:
        raise UsageError(
            f"zip() joins points one to one, but was given {', '.join(map(str, lengths))} of them; give equally many, "
            "or use product() for all combinations"
        )
    return tuple(_joined(combination) for combination in builtins.zip(*together, strict=True))


def chain(*parts: Points) -> Points:
    """All of these points, one part after another.

    >>> len(chain(values("seed", range(3)), values("seed", [7])))
    4
    """
    return tuple(itertools.chain(*parts))


def where(candidates: Points, keep: Callable[[Point], bool]) -> Points:
    """The points for which `keep` is true.

    >>> where(values("seed", range(5)), lambda point: point["seed"] % 2 == 0)
    ({'seed': 0}, {'seed': 2}, {'seed': 4})
    """
    return tuple(point for point in candidates if keep(point))


def sort(candidates: Points, key: str) -> Points:
    """The points in the order of one option's values, which is the order in which they are started.

    Points of equal value keep their order. Sorted by seed, a sweep can be compared before all of it is finished.

    Raises UsageError where a point does not set the option, or values cannot be ordered.

    >>> sort(product(values("head.name", ["tied", "untied"]), values("seed", [0, 1])), "seed")[1]
    {'head.name': 'untied', 'seed': 0}
    """
    for point in candidates:
        if key not in point:
            raise UsageError(
                f"sort() orders points by {key}, which {dict(point)} does not set; set it in every point"
            )
    try:
        return tuple(sorted(candidates, key=lambda point: point[key]))
    except TypeError as error:
        raise UsageError(
            f"sort() cannot order the values of {key} ({error}); order them by hand, with chain()"
        ) from error


def _joined(combination: Iterable[Point]) -> Point:
    joined: dict[str, Any] = {}
    for point in combination:
        for key, value in point.items():
            if key in joined:
                raise UsageError(
                    f"{key} is set twice in one point, to {joined[key]!r} and {value!r}; set it in one of what "
                    "product() or zip() joins, or use chain()"
                )
            joined[key] = value
    return joined
