"""Learning curves: light for training, dark for held-out loss; tied blue, untied red."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# (light, dark) of ColorBrewer's RdBu, which readers with any colour vision tell apart; the markers
# serve print without colour
COLOURS = {"tied": ("#92c5de", "#0571b0"), "untied": ("#f4a582", "#ca0020")}
MARKERS = {"tied": "o", "untied": "s"}


def draw(curves: Sequence[Mapping[str, Any]]) -> Figure:
    """The losses of all runs above, and below what the untied head gains or loses, seed by seed.

    `curves` holds for each run "head", "seed", and "train" and "validation": [step, nats a token].
    """
    figure = Figure(figsize=(7, 6), layout="constrained")
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    seen = set()
    for run in curves:
        head = run["head"]
        light, dark = COLOURS[head]
        named = head not in seen  # one entry in the legend, however many seeds
        seen.add(head)
        losses.plot(
            *_columns(run["train"]),
            color=light,
            linewidth=1,
            zorder=1,
            label=f"{head}, training" if named else None,
        )
        losses.plot(
            *_columns(run["validation"]),
            color=dark,
            linewidth=1.8,
            marker=MARKERS[head],
            markersize=4,
            zorder=2,
            label=f"{head}, held-out" if named else None,
        )
    losses.set_ylabel("loss (nats per token)")
    losses.set_title("Tied and untied output heads")
    losses.legend(frameon=False)
    differences.axhline(0, color=COLOURS["tied"][1], linewidth=1)
    for steps, difference in _differences(curves):
        differences.plot(
            steps, difference, color=COLOURS["untied"][1], marker=MARKERS["untied"], markersize=4
        )
    differences.set_ylabel("untied − tied, held-out\n(nats per token)")
    differences.set_xlabel("step")
    differences.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (losses, differences):
        axes.grid(color="0.92")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _differences(curves: Sequence[Mapping[str, Any]]) -> list[tuple[list[int], list[float]]]:
    """(steps, held-out loss of untied − tied) for each seed."""
    by_run = {(run["head"], run["seed"]): dict(run["validation"]) for run in curves}
    pairs = []
    for (head, seed), untied in by_run.items():
        if head == "untied":
            tied = by_run["tied", seed]
            steps = sorted(untied.keys() & tied.keys())
            pairs.append((steps, [untied[step] - tied[step] for step in steps]))
    return pairs


def _columns(points: Sequence[Sequence[float]]) -> tuple[np.ndarray, np.ndarray]:
    steps, values = np.asarray(points, np.float64).T
    return steps, values
