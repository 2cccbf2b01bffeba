"""Figures of what the analysis measures: matplotlib Figures without pyplot's state, for `figure.savefig(path)`.

Colours are those of Okabe & Ito (2008), which readers with any colour vision tell apart; markers and dashes say the
same again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from headlab.analysis.spectra import Spectrum

COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#000000",
    "#999999",
    "#8c510a",  # a ninth, dark brown, of ColorBrewer's BrBG
)
_MARKERS = "osD^vP*Xp"
_DASHES = ("-", "--", "-.", ":")
_LINES_WITH_ROOM = 4  # for a legend in the axes

Points = Mapping[str, Sequence[tuple[float, float]]]


def draw_spectra(spectra: Mapping[str, Spectrum], bounds: Mapping[str, int | None]) -> Figure:
    """Singular values over the largest, on log axes, a line a head; thin rules mark where theorems end each.

    The legend says the bounds, and which spectra are a sketch's, whose values are estimates. Values that are exactly 0
    can't be drawn on a log axis and are left out.
    """
    many = len(spectra) > _LINES_WITH_ROOM
    figure, axes = _axes(
        "index of the singular value", "singular value ÷ the largest", 9.5 if many else 7
    )
    for number, (name, found) in enumerate(spectra.items()):
        values = found.singular_values / (found.singular_values[0] or 1)
        shown = values > 0
        line, bound = _line(number), bounds.get(name)
        label = name + (" (sketch, estimates)" if found.sketch else "")
        if bound is not None:
            label += f", theorem: {bound:,}"
            axes.axvline(bound, color=line["color"], linewidth=0.8, alpha=0.6)
        index = np.arange(1, len(values) + 1)
        axes.plot(index[shown], values[shown], label=label, **line)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title("Spectrum of the log-probability matrix")
    if many:
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1), fontsize=9)
    else:
        axes.legend(frameon=False, loc="lower left")
    return figure


def draw_rank(points: Points, theorem: Points | None = None) -> Figure:
    """Measured rank against d_model, a head a line, with the theorem's bounds as thin lines where they are given."""
    figure, axes = _axes("d_model", "numerical rank of log P")
    _draw(axes, points)
    for number, name in enumerate(points):
        if theorem and theorem.get(name):
            widths, bounds = zip(*sorted(theorem[name]), strict=True)
            axes.plot(widths, bounds, color=COLOURS[number % len(COLOURS)], linewidth=0.7)
    axes.set_title("Rank against width; thin lines are the theorem's bounds")
    axes.legend(frameon=False)
    return figure


def draw_loss(points: Points, *, x: str = "numerical rank of log P") -> Figure:
    """Held-out loss (nats a token) against rank, or whatever `x` names; a head a mark."""
    figure, axes = _axes(x, "held-out loss (nats per token)")
    _draw(axes, points, joined=False)
    axes.set_title("Loss against rank")
    axes.legend(frameon=False)
    return figure


def draw_excess(points: Points, rank: int) -> Figure:
    """Excess KL (nats a context) against the width of the head on a log axis; a rule at the rank of the truth."""
    figure, axes = _axes("d_model", "excess KL (nats per context)")
    _draw(axes, points)
    axes.axvline(rank, color="0.5", linewidth=0.8, linestyle=":")
    axes.set_yscale("log")
    axes.set_title(f"Fit of distributions whose row-centred log P has rank {rank}")
    axes.legend(frameon=False)
    return figure


def draw_steps(points: Points, quantity: str) -> Figure:
    """A quantity (named with its unit) over the steps of training, a run or a head a line."""
    figure, axes = _axes("step", quantity)
    _draw(axes, points)
    axes.legend(frameon=False)
    return figure


def _axes(x: str, y: str, inches: float = 7) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(inches, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _line(number: int) -> dict[str, Any]:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": _DASHES[number % len(_DASHES)],
        "linewidth": 1.6,
    }


def _draw(axes: Axes, points: Points, *, joined: bool = True) -> None:
    for number, (name, values) in enumerate(points.items()):
        x, y = zip(*sorted(values), strict=True)
        style = _line(number) if joined else {"color": COLOURS[number % len(COLOURS)]}
        marker = _MARKERS[number % len(_MARKERS)]
        line = style if joined else style | {"linestyle": "none"}
        axes.plot(x, y, marker=marker, markersize=5, label=name, **line)
