"""Sweeps: many runs of one question, defined by a file, run by a launcher, resumable as a whole.

A sweep file defines `get_sweep()`, which returns a `Sweep`; points are made by `values` and `points`, and combined by
`product`, `zip`, `chain` and `where`.
"""

from headlab.sweeps.definition import Plan, PlannedPoint, Sweep, load, words
from headlab.sweeps.points import Point, Points, chain, points, product, values, where, zip

__all__ = [
    "Plan",
    "PlannedPoint",
    "Point",
    "Points",
    "Sweep",
    "chain",
    "load",
    "points",
    "product",
    "values",
    "where",
    "words",
    "zip",
]
