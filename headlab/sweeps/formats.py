"""A comparison as text: a table for the terminal or Markdown, rounded for reading; CSV and JSON, exact."""

import csv
import io
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from headlab.config.values import as_text
from headlab.sweeps.comparison import CONFIDENCE, Comparison, Row
from headlab.sweeps.directories import Problem

COLUMNS = ("group", "n", "metric", "difference", "parameters", "bits per byte", "tokens a second")
SORTS: dict[str, Callable[[Row], Any]] = {
    "metric": lambda row: row.mean,
    "difference": lambda row: math.inf if row.difference is None else row.difference.mean,
    "parameters": lambda row: row.group.rows["parameters"].iloc[0],
    "speed": lambda row: -row.group.rows["tokens_per_second"].mean(),
    "name": lambda row: row.group.name,
}
"""The orders in which groups can be listed, beside the best first."""


def as_terminal_table(comparison: Comparison, frame: pd.DataFrame, width: int) -> str:
    """A table of so many columns of characters, and under it what a reader must know."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=Text(_title(comparison)), title_justify="left", box=box.SIMPLE_HEAD)
    for number, column in enumerate(header(comparison)):
        grid.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in comparison.rows:
        grid.add_row(*map(Text, cells(row, comparison)))  # Text: brackets in a name are no markup
    file = io.StringIO()
    console = Console(file=file, width=width)
    console.print(grid)
    for note in all_notes(comparison, frame):
        console.print(Text(note))
    return file.getvalue()


def as_markdown(comparison: Comparison, frame: pd.DataFrame) -> str:
    """A table of GitHub's Markdown, and under it what a reader must know."""
    head = header(comparison)
    lines = [f"**{_title(comparison)}**", "", _markdown_row(head)]
    lines.append(_markdown_row(["---", *["---:"] * (len(head) - 1)]))
    lines += [_markdown_row(cells(row, comparison)) for row in comparison.rows]
    notes = all_notes(comparison, frame)
    lines += ["", *(f"- {_escaped(note)}" for note in notes)] if notes else []
    return "\n".join(lines) + "\n"


def as_csv(comparison: Comparison) -> str:
    """A line a group; every number reads back exactly, and what is not known is empty."""
    records = [_record(row, comparison) for row in comparison.rows]
    keys = list(dict.fromkeys(key for record in records for key in record["values"]))
    plain = [key for key in records[0] if key not in ("values", "difference")]
    fields = [*plain, *_DIFFERENCE]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*fields[:1], *keys, *fields[1:]])
    for record in records:
        values = [_csv_cell(record["values"].get(key)) for key in keys]
        difference = record["difference"] or {}
        own = [_csv_cell(record[key]) for key in plain]
        own += [_csv_cell(difference.get(key)) for key in _DIFFERENCE.values()]
        writer.writerow([*own[:1], *values, *own[1:]])
    return file.getvalue()


def as_json(comparison: Comparison, frame: pd.DataFrame) -> str:
    """Everything: the groups, their runs, notes, and the runs that are not compared; numbers are exact."""
    unfinished = frame[frame["state"] != "finished"]
    content = {
        "metric": comparison.metric.column,
        "unit": comparison.metric.unit,
        "groups": [_record(row, comparison) for row in comparison.rows],
        "notes": comparison.notes,
        "unfinished": [
            {
                "name": run["name"],
                "state": run["state"],
                "error": run["error"],
                "step": run["step"],
                "steps": run["steps"],
                "last_loss": _known(run["last_loss"]),
                "last_step": run["last_step"],
            }
            for run in unfinished.to_dict("records")
        ],
        "left_out": [Problem(*problem)._asdict() for problem in frame.attrs["left_out"]],
        "not_started": [name for name, *_ in frame.attrs["not_started"]],
    }
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def header(comparison: Comparison) -> list[str]:
    """The columns of a table for reading."""
    names = {"metric": comparison.metric.words}
    repeated = comparison.metric.column == "bits_per_byte"
    interval = any(row.difference and row.difference.low is not None for row in comparison.rows)
    names["difference"] = "difference" + (" (95% interval)" if interval else "")
    return [names.get(c, c) for c in COLUMNS if not (repeated and c == "bits per byte")]


def cells(row: Row, comparison: Comparison) -> list[str]:
    """A group's row of a table for reading, rounded."""
    digits, rows = comparison.metric.digits, row.group.rows
    shown = [
        row.group.name,
        str(row.n),
        with_error(row.mean, row.standard_error, digits),
        difference_text(row, digits),
        f"{rows['parameters'].iloc[0]:,.0f}",
    ]
    if comparison.metric.column != "bits_per_byte":
        shown.append(f"{rows['bits_per_byte'].mean():.4f}")
    speed = rows["tokens_per_second"].mean()
    return [*shown, "" if math.isnan(speed) else f"{speed:,.0f}"]


def with_error(mean: float, error: float | None, digits: int) -> str:
    """ "3.1416 ± 0.0012", or the mean alone."""
    return f"{mean:,.{digits}f}" + ("" if error is None else f" ± {error:,.{digits}f}")


def difference_text(row: Row, digits: int) -> str:
    """ "+0.0123 (+0.0100 to +0.0146)", or why there is none."""
    if row.difference is None:
        return row.why_none
    _, mean, low, high, *_ = row.difference
    text = f"{mean:+,.{digits}f}"
    if low is not None and high is not None:
        text += f" ({low:+,.{digits}f} to {high:+,.{digits}f})"
    pairs = len(row.difference.by_seed)
    return text if pairs == row.n else f"{text}, {pairs} of {row.n} seeds"


def all_notes(comparison: Comparison, frame: pd.DataFrame) -> list[str]:
    """What a reader must know beside the numbers: how they were made, and the runs that are not among them."""
    notes = list(comparison.notes)
    for run in frame[frame["state"] != "finished"].itertuples():
        last = "no held-out loss yet"
        if not math.isnan(run.last_loss):
            last = f"held-out loss {run.last_loss:.4f} at step {run.last_step:,}"
        what = "Not finished" if run.error is None else f"Failed ({run.error})"
        notes.append(
            f"{what}, so not compared: {run.name}, step {run.step:,} of {run.steps:,}, {last}."
        )
    notes += [f"Left out: {name}: {reason}" for name, _, reason in frame.attrs["left_out"]]
    notes += [f"No run yet: {name}: {reason}" for name, _, reason in frame.attrs["not_started"]]
    return notes


_DIFFERENCE = {
    "baseline": "baseline",
    "difference": "mean",
    "difference_low": "low",
    "difference_high": "high",
    "pairs": "pairs",
}


def _record(row: Row, comparison: Comparison) -> dict[str, Any]:
    rows, difference = row.group.rows, row.difference
    means = {
        column: _known(rows[column].mean())
        for column in ("bits_per_byte", "tokens_per_second", "wall_seconds", "peak_memory")
        if column != comparison.metric.column
    }
    return {
        "group": row.group.name,
        "values": row.group.values,
        "n": row.n,
        comparison.metric.column: row.mean,
        "standard_error": row.standard_error,
        "parameters": int(rows["parameters"].iloc[0]),
        **means,
        "seeds": [int(seed) for seed in rows.index],
        "by_seed": [float(value) for value in rows[comparison.metric.column]],
        "runs": [str(name) for name in rows["name"]],
        "no_difference": row.why_none or None,
        "difference": None
        if difference is None
        else {
            "baseline": difference.baseline,
            "mean": difference.mean,
            "low": difference.low,
            "high": difference.high,
            "confidence": CONFIDENCE,
            "pairs": len(difference.by_seed),
            "by_seed": {str(seed): value for seed, value in difference.by_seed.items()},
            "unmatched": difference.unmatched,
        },
    }


def _title(comparison: Comparison) -> str:
    metric = comparison.metric
    spread = "; mean ± standard error over seeds" if any(r.n > 1 for r in comparison.rows) else ""
    return f"{metric.words.capitalize()} in {metric.unit}, {metric.best} first{spread}"


def _known(value: Any) -> float | None:
    return None if math.isnan(value) else float(value)


def _csv_cell(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(str, value))
    return "" if value is None else value if isinstance(value, str) else as_text(value)


def _markdown_row(values: Sequence[str]) -> str:
    return f"| {' | '.join(map(_escaped, values))} |"


def _escaped(text: str) -> str:
    """Text of a run as Markdown that shows it as it is."""
    plain = re.sub(r"([\\|*_`\[\]])", r"\\\1", " ".join(text.split()))
    return plain.replace("<", "&lt;").replace(">", "&gt;")
