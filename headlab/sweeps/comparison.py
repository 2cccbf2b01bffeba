"""Groups of runs compared over seeds: means, standard errors, and differences paired by seed.

Two runs of one seed share the order of batches and, as far as their shapes allow, the initial weights; the
difference of such a pair varies less than the losses do.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import special

from headlab.errors import UsageError
from headlab.sweeps.baselines import Baseline, choose_baseline
from headlab.sweeps.groups import Group, grouped

CONFIDENCE = 0.95


class Metric(NamedTuple):
    """A column of the table that groups are compared in."""

    column: str
    words: str
    unit: str
    best: str = "lowest"  # or "highest"
    digits: int = 4  # after the point, where it is rounded for reading


METRICS = {
    metric.column: metric
    for metric in (
        Metric("loss", "held-out loss", "nats a token"),
        Metric("bits_per_byte", "held-out bits per byte", "bits a byte"),
        Metric("best_loss", "best held-out loss", "nats a token"),
        Metric("test_loss", "test loss", "nats a token"),
        Metric("test_bits_per_byte", "test bits per byte", "bits a byte"),
        Metric("train_loss", "training loss", "nats a token"),
        Metric("tokens_per_second", "training speed", "tokens a second", "highest", 0),
    )
}
"""What groups can be compared in; the first one is the default."""


class Difference(NamedTuple):
    """A group's metric minus the baseline's, paired by seed."""

    baseline: str  # the name of its group
    mean: float
    low: float | None  # the ends of the 95% interval; None with one pair
    high: float | None
    by_seed: dict[int, float]
    unmatched: list[str]  # "group, seed" of runs without a partner, which were left out


class Row(NamedTuple):
    """What is known of one group."""

    group: Group
    n: int
    mean: float
    standard_error: float | None  # None for one run
    difference: Difference | None
    why_none: str  # why there is no difference; "" where there is one


class Comparison(NamedTuple):
    """Groups of runs, the best first."""

    metric: Metric
    rows: list[Row]
    notes: list[str]  # what a reader must know to read the table rightly


def compare(
    frame: pd.DataFrame,
    *,
    baseline: str | Mapping[str, Any] | None = None,
    metric: str | None = None,
) -> Comparison:
    """Compares the finished runs of a table of `load`.

    The difference to the baseline is d̄ ± t(0.975, n − 1)·s/√n over the n seeds that both groups have, with s the
    standard deviation (n − 1) of the differences: Student's paired interval of 95%. It takes the differences of
    seeds as normal, and covers each comparison by itself, not all of a table together.

    Args:
      frame: what `load` gives, or some of its rows.
      baseline: {key: value}, "KEY=VALUE,…", or the name of a run or group. Keys and values that leave several
        groups open pair each group with the baseline of its other values. None: that of the runs' sweep.json; where
        there is none, or it has no finished run, the first group.
      metric: one of METRICS. None: the held-out loss, or bits per byte where losses do not compare.

    Raises:
      UsageError: nothing has finished; no such metric or baseline; nats were asked for between tokenizers; or two
        runs are of one group and one seed.
    """
    groups = grouped(frame)
    if not groups:
        raise UsageError(f"there is nothing to compare: no run has finished{_states(frame)}")
    chosen, notes = _comparable(metric, groups)
    partners, doubts = _partners(groups, baseline, frame)
    rows = [_row(group, chosen, partner) for group, partner in zip(groups, partners, strict=True)]
    sign = 1 if chosen.best == "lowest" else -1
    rows.sort(key=lambda row: sign * row.mean)
    return Comparison(chosen, rows, [*notes, *doubts, *_notes(rows, chosen)])


def mean_and_error(values: Any) -> tuple[float, float | None]:
    """The mean, and its standard error s/√n with s over n − 1; None for one value."""
    array = np.asarray(values, np.float64)
    if len(array) == 1:
        return float(array[0]), None
    return float(array.mean()), float(array.std(ddof=1) / math.sqrt(len(array)))


def paired_difference(
    values: Mapping[int, float], baseline: Mapping[int, float]
) -> tuple[float, float | None, float | None]:
    """(mean, low, high) of values − baseline over the seeds of both; no bounds for one seed.

    >>> paired_difference({0: 1.0, 1: 2.0}, {1: 1.5})
    (0.5, None, None)
    """
    seeds = [seed for seed in values if seed in baseline]
    mean, error = mean_and_error([values[seed] - baseline[seed] for seed in seeds])
    if error is None:
        return mean, None, None
    reach = float(special.stdtrit(len(seeds) - 1, (1 + CONFIDENCE) / 2)) * error
    return mean, mean - reach, mean + reach


def _partners(
    groups: list[Group], baseline: str | Mapping[str, Any] | None, frame: pd.DataFrame
) -> tuple[list[Baseline], list[str]]:
    """(the baseline of each group, what must be said of the choice)."""
    recorded = frame.attrs.get("baselines", [])
    if baseline is not None or not recorded:
        return choose_baseline(groups, baseline, frame), []
    if any(other != recorded[0] for other in recorded):
        raise UsageError(
            f"the sweeps have baselines of their own, {' and '.join(map(str, recorded))}: give one for all"
        )
    try:
        return choose_baseline(groups, recorded[0], frame), []
    except UsageError as problem:
        note = f"Compared with {groups[0].name}, for the sweep's own baseline cannot be used: {problem}."
        return choose_baseline(groups, None, frame), [note]


def _states(frame: pd.DataFrame) -> str:
    shown = [f"{run.name} is at step {run.step} of {run.steps}" for run in frame[:5].itertuples()]
    more = [f"{len(frame) - 5} more"] if len(frame) > 5 else []
    return f" ({'; '.join([*shown, *more])})" if shown else ""


def _row(group: Group, metric: Metric, partner: Baseline) -> Row:
    values = group.rows[metric.column]
    mean, error = mean_and_error(values)
    difference, why_none = _difference(group, metric, partner)
    return Row(group, len(values), mean, error, difference, why_none)


def _difference(group: Group, metric: Metric, partner: Baseline) -> tuple[Difference | None, str]:
    other = partner.group
    if other is None or other is group:
        return None, partner.why_none or "the baseline"
    if metric.unit == "bits a byte" and _kinds([group, other], "text") > 1:
        return None, f"{other.name} has another held-out text"
    mine, theirs = (dict(g.rows[metric.column]) for g in (group, other))
    seeds = [seed for seed in mine if seed in theirs]
    if not seeds:
        return None, f"no seed in common with {other.name}"
    unmatched = [f"{group.name}, seed {seed}" for seed in mine if seed not in theirs]
    unmatched += [f"{other.name}, seed {seed}" for seed in theirs if seed not in mine]
    by_seed = {int(seed): float(mine[seed] - theirs[seed]) for seed in seeds}
    return Difference(other.name, *paired_difference(mine, theirs), by_seed, unmatched), ""


def _comparable(asked: str | None, groups: list[Group]) -> tuple[Metric, list[str]]:
    """(the metric, what must be said of it): nats are of one tokenizer's tokens."""
    if asked is not None and asked not in METRICS:
        raise UsageError(f"metric is {asked!r}; it must be one of {', '.join(METRICS)}")
    metric = METRICS[asked or "loss"]
    texts, tokenizers = _kinds(groups, "text"), _kinds(groups, "tokenizer")
    notes = []
    if metric.unit == "nats a token" and tokenizers > 1:
        of = f"{texts} held-out texts" if texts > 1 else f"{tokenizers} tokenizers"
        why = f"the runs are of {of}, and nats a token compare only between runs of one"
        if asked is not None:
            raise UsageError(
                f"{asked} cannot be compared: {why}. Use bits_per_byte or test_bits_per_byte, or name "
                "runs of one corpus and one tokenizer."
            )
        metric = METRICS["bits_per_byte"]
        notes.append(f"Compared in bits per byte: {why}.")
    if metric.unit == "bits a byte" and texts > 1:
        notes.append(
            f"The runs are of {texts} held-out texts: one may be harder than another, so there are no "
            "differences between them."
        )
    return metric, notes


def _kinds(groups: list[Group], kind: str) -> int:
    return len({value for group in groups for value in group.rows[kind]})


def _notes(rows: list[Row], metric: Metric) -> list[str]:
    notes = []
    differences = [row.difference for row in rows if row.difference is not None]
    if any(difference.low is None for difference in differences):
        notes.append("A difference of one pair of seeds has no interval: run more seeds.")
    unmatched = sorted({run for difference in differences for run in difference.unmatched})
    if unmatched:
        notes.append(
            f"Left out of the paired differences, for want of a partner: {'; '.join(unmatched)}."
        )
    if metric.column == "best_loss":
        notes.append(
            "The best of several evaluations is chosen on the split it is measured on: it is optimistic."
        )
    return notes
