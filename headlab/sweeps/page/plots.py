"""The numbers that the page's plots are drawn from."""

import math
from collections.abc import Sequence
from typing import Any

from headlab.sweeps.comparison import Row, paired_difference
from headlab.sweeps.page.content import Content
from headlab.sweeps.page.curves import curve_data, points_per_run
from headlab.sweeps.page.tables import BAND_NAMES
from headlab.sweeps.results import BANDS


def plot_data(content: Content) -> dict[str, Any]:
    """Everything that the page's script draws, as JSON can hold it."""
    entries = _entries(content)
    return {
        "entries": [
            {key: value for key, value in entry.items() if key != "rest"} for entry in entries
        ],
        "metric": _metric(content),
        "runs": _runs(content, entries),
        "differences": _differences(content),
        "sizes": [_size(row, content) for row in content.rows],
        "bands": {"names": BAND_NAMES, "groups": [_bands(row, content) for row in content.rows]},
        "spectra": [found._asdict() for found in content.spectra],
    }


def _entries(content: Content) -> list[dict[str, Any]]:
    """What the legend lists: the groups, then the unfinished runs of each head; `rank` counts within a head."""
    listed: list[dict[str, Any]] = [
        {"name": row.group.name, "head": row.group.rows["head"].iloc[0]} for row in content.rows
    ]
    grouped = content.group_ids()
    rest = [run.config["head.name"] for run in content.runs if run.name not in grouped]
    seen: dict[str, int] = {}
    for entry in listed:
        entry["rank"] = seen.setdefault(entry["head"], 0)
        seen[entry["head"]] += 1
    listed += [
        {
            "name": f"head={head}, not finished",
            "head": head,
            "rest": head,
            "rank": 0,
            "unfinished": True,
        }
        for head in dict.fromkeys(rest)
    ]
    for number, entry in enumerate(listed):
        entry["id"] = str(number)
    return listed


def _runs(content: Content, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    limit = points_per_run(len(content.runs))
    grouped = content.group_ids()
    rest = {entry["rest"]: entry["id"] for entry in entries if "rest" in entry}
    return [
        {
            "name": run.name,
            "seed": run.config["seed"],
            "entry": grouped.get(run.name) or rest[run.config["head.name"]],
            **curve_data(run, limit),
        }
        for run in content.runs
    ]


def _metric(content: Content) -> dict[str, Any] | None:
    if content.comparison is None:
        return None
    metric = content.comparison.metric
    return {"words": metric.words, "unit": metric.unit, "digits": metric.digits}


def _differences(content: Content) -> list[dict[str, Any]]:
    return [
        {
            "entry": str(number),
            "baseline": row.difference.baseline,
            "mean": row.difference.mean,
            "low": row.difference.low,
            "high": row.difference.high,
            "seeds": list(row.difference.by_seed),
            "values": list(row.difference.by_seed.values()),
        }
        for number, row in enumerate(content.rows)
        if row.difference is not None
    ]


def _size(row: Row, content: Content) -> dict[str, Any]:
    """Parameters by part, and where the group stands against each measure of size."""
    rows, budget = row.group.rows, content.budgets.get(row.group.name)
    parts = {
        part: int(rows[f"parameters_{part}"].iloc[0]) for part in ("embedding", "head", "body")
    }
    name = rows["name"].iloc[0]
    result = next(run.result for run in content.runs if run.name == name)
    assert result is not None
    bounded = budget is not None and budget.rank_bound is not None
    return {
        "mean": row.mean,
        "error": row.standard_error,
        **parts,
        "parameters": int(rows["parameters"].iloc[0]),
        "flops": budget and budget.training_flops_per_token * float(rows["tokens_seen"].mean()),
        # where nothing below V is promised, V itself is the bound
        "rank": budget and (budget.rank_bound if bounded else result["vocab_size"]),
        "bounded": bounded,
    }


def _bands(row: Row, content: Content) -> dict[str, Any]:
    """Mean loss of each band, and the paired difference to the baseline with its interval."""
    found: dict[str, Any] = {"loss": [_known(row.group.rows[band].mean()) for band in BANDS]}
    if row.difference is None:
        return found
    groups = {other.group.name: other.group for other in content.rows}
    baseline = groups[row.difference.baseline]
    differences: list[Sequence[float | None]] = []
    for band in BANDS:
        mine, theirs = (dict(group.rows[band].dropna()) for group in (row.group, baseline))
        paired = any(seed in theirs for seed in mine)
        differences.append(paired_difference(mine, theirs) if paired else (None, None, None))
    keys = ("difference", "low", "high")
    return found | {key: [d[i] for d in differences] for i, key in enumerate(keys)}


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
