"""Results of many runs: one table, comparisons over seeds, a page to send to a colleague."""

from headlab.sweeps.results import load

__all__ = ["load"]
