"""Sweeps: many runs of one question, defined by a file, run by a launcher, resumable as a whole; and their results.

A sweep file defines `get_sweep()`, which returns a `Sweep`; points are made by `values` and `points`, and combined by
`product`, `zip`, `chain`, `where` and `sort`. `match` finds the option that makes models equally large. `load` reads
the results of runs as one table.
"""

import importlib
from typing import TYPE_CHECKING, Any

from headlab.sweeps.definition import Plan, PlannedPoint, Sweep, config_of, plan, words
from headlab.sweeps.points import Point, Points, chain, points, product, sort, values, where, zip

if TYPE_CHECKING:
    from headlab.sweeps.launchers import SlurmOptions
    from headlab.sweeps.results import load
    from headlab.sweeps.running import run, statuses
    from headlab.sweeps.sizes import Measure, match, parameters, size
    from headlab.sweeps.states import Status, tally

__all__ = [
    "Measure",
    "Plan",
    "PlannedPoint",
    "Point",
    "Points",
    "SlurmOptions",
    "Status",
    "Sweep",
    "chain",
    "config_of",
    "load",
    "match",
    "parameters",
    "plan",
    "points",
    "product",
    "run",
    "size",
    "sort",
    "statuses",
    "tally",
    "values",
    "where",
    "words",
    "zip",
]

# Imported when they are used: most bring JAX with them, which a process of a sweep must not import before it is told
# which devices are its own.
_LATER = {
    "load": "results",
    "SlurmOptions": "launchers",
    "run": "running",
    "statuses": "running",
    "Measure": "sizes",
    "match": "sizes",
    "parameters": "sizes",
    "size": "sizes",
    "Status": "states",
    "tally": "states",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
