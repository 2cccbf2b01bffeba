"""The tables of the page."""

import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from headlab.config import ABSENT, OPTIONS
from headlab.config.values import as_text
from headlab.sweeps.comparison import Row
from headlab.sweeps.formats import difference_text, with_error
from headlab.sweeps.groups import is_setting
from headlab.sweeps.page.content import Content
from headlab.sweeps.page.curves import curve
from headlab.sweeps.page.markup import Cell, Column, table, text
from headlab.sweeps.results import BANDS, Run, varying_keys

_UNKNOWN = Cell("–", math.inf)


def results_table(content: Content) -> str:
    """A row a group: what was measured, over seeds, and what it cost."""
    comparison = content.comparison
    if comparison is None:
        return ""
    metric = comparison.metric
    columns = [
        Column("Group", numeric=False),
        Column("Runs", help="finished runs, one a seed"),
        Column(_capital(metric.words), help=f"{metric.unit}; mean ± standard error over seeds"),
        Column("Difference to baseline", help="paired by seed, with its 95% interval"),
        *(Column(_capital(words)) for words, *_ in _others(metric.column)),
        Column("Parameters"),
        Column("In the head", help="parameters of the head alone"),
        Column("Rank bound", help="the theorem's bound on the rank of the log-probabilities"),
        Column("Training FLOPs", help="three times the forward pass, over all tokens seen"),
        Column("Tokens a second", help="the median of each run, averaged over runs"),
    ]
    if content.frame["peak_memory"].notna().any():
        columns.append(Column("Peak memory", help="the mean over runs"))
    rows = [_result(row, content) for row in comparison.rows]
    ids = [str(number) for number in range(len(rows))]
    caption = f"{_capital(metric.words)} in {metric.unit} by group, {metric.best} first"
    return table(caption, columns, rows, sortable=True, swatches=ids)


def runs_table(content: Content) -> str:
    """A row a run, finished or not."""
    frame = content.frame
    keys = [key for key in frame.columns if is_setting(key)]
    columns = [
        Column("Run", numeric=False),
        Column("State", numeric=False, words=True),
        Column("Seed"),
        *(
            Column(title)
            for title in ("Held-out loss", "Best, at step", "Test loss", "Bits per byte", "Time")
        ),
        *(Column(key, numeric=False) for key in keys),
    ]
    ids = content.group_ids()
    rows = []
    for run in frame.to_dict("records"):
        settings = [_setting(run[key]) for key in keys]
        rows.append(
            [Cell(run["name"]), _state(run), _number(run["seed"]), *_losses(run), *settings]
        )
    swatches = [ids.get(name, "none") for name in frame["name"]]
    return table("Every run", columns, rows, sortable=True, swatches=swatches)


def missing_table(content: Content) -> str:
    """The runs that are not in any other table; "" where there is none."""
    attrs = content.frame.attrs
    rows = [
        [Cell(name), Cell(kind), Cell(reason), Cell(path)]
        for kind, problems in (("left out", "left_out"), ("no run yet", "not_started"))
        for name, path, reason in attrs[problems]
    ]
    columns = [
        Column(title, numeric=False, words=True) for title in ("Run", "State", "Why", "Where")
    ]
    return table("Runs that are damaged or have not begun", columns, rows) if rows else ""


def bands_table(content: Content) -> str:
    """Mean held-out loss of each group by frequency of the target."""
    columns = [Column("Group", numeric=False), *(Column(name) for name in BAND_NAMES)]
    rows = [
        [Cell(row.group.name), *(_number(row.group.rows[band].mean(), 4) for band in BANDS)]
        for row in content.rows
    ]
    caption = "Held-out loss in nats a token by tenth of the vocabulary, the most frequent first"
    return table(caption, columns, rows)


def held_out_table(content: Content) -> str:
    """Held-out loss of each run at each evaluation."""
    curves = {
        run.name: dict(zip(*curve(run, "validation/loss"), strict=True)) for run in content.runs
    }
    steps = sorted({step for points in curves.values() for step in points})
    if len(steps) > 25:  # a reader wants the course; the plot and metrics.jsonl have every point
        chosen = {steps[round(i)] for i in np.linspace(0, len(steps) - 1, 25)}
        steps = [step for step in steps if step in chosen]
    rows = [
        [Cell(name), *(_number(points.get(step, math.nan), 4) for step in steps)]
        for name, points in curves.items()
    ]
    columns = [Column("Run", numeric=False), *(Column(f"{step:,}") for step in steps)]
    return table("Held-out loss in nats a token by step", columns, rows)


def spectra_table(content: Content) -> str:
    """Some singular values of each spectrum."""
    numbers = [2**power for power in range(9)]
    rows = []
    for found in content.spectra:
        values = dict(zip(found.numbers, found.values, strict=True))
        cells = [_number(values.get(number, math.nan), 4) for number in numbers]
        rows.append([Cell(found.run), Cell(found.name), *cells])
    columns = [Column("Run", numeric=False), Column("Matrix", numeric=False)]
    columns += [Column(f"{number}.") for number in numbers]
    return table("Singular values by their number, the largest first", columns, rows)


def config_table(content: Content) -> str:
    """Every option; those in which the runs differ are marked, with the values and their runs."""
    configs = [run.config for run in content.runs]
    differing = set(varying_keys(configs))
    order = {key: number for number, key in enumerate(OPTIONS)}
    keys = dict.fromkeys(key for config in configs for key in config)
    body = []
    for key in sorted(
        keys, key=lambda key: (key.partition(".")[0], order.get(key, len(order)), key)
    ):
        counts: dict[str, int] = {}
        for config in configs:
            value = _shown(config.get(key, ABSENT))
            counts[value] = counts.get(value, 0) + 1
        if key in differing:
            values = ", ".join(f"{value} ({_runs(count)})" for value, count in counts.items())
            mark = "<strong>differs</strong>"
        else:
            values, mark = next(iter(counts)), ""
        kind = ' class="differs"' if mark else ""
        body.append(
            f'<tr{kind}><th scope="row"><code>{text(key)}</code></th><td>{text(values)}</td><td>{mark}</td></tr>'
        )
    caption = f"Every option of the {_runs(len(configs))}"
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{text(caption)}"><table class="plain">'
        f'<caption>{text(caption)}</caption><thead><tr><th scope="col">Option</th><th scope="col">Value</th>'
        f'<th scope="col">Differs</th></tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    )


def provenance_table(content: Content) -> str:
    """Versions, devices, commits and seeds of the finished runs."""
    found: dict[str, dict[str, int]] = {}
    for run in content.runs:
        for key, value in _provenance(run):
            counts = found.setdefault(key, {})
            counts[value] = counts.get(value, 0) + 1
    rows = []
    for key, counts in found.items():
        several = len(counts) > 1
        values = [f"{value} ({_runs(n)})" if several else value for value, n in counts.items()]
        rows.append([Cell(key), Cell(", ".join(values))])
    columns = [Column("What", numeric=False), Column("Value", numeric=False, words=True)]
    return table("Versions, commits, devices and seeds", columns, rows)


BAND_NAMES = tuple(map(str, range(1, len(BANDS) + 1)))


def _others(metric: str) -> list[tuple[str, str, int]]:
    others = [("bits per byte", "bits_per_byte", 4), ("test loss", "test_loss", 4)]
    return [other for other in others if other[1] != metric]


def _result(row: Row, content: Content) -> list[Cell]:
    assert content.comparison is not None
    digits, rows = content.comparison.metric.digits, row.group.rows
    budget = content.budgets.get(row.group.name)
    difference = math.inf if row.difference is None else row.difference.mean
    recorded = content.frame["peak_memory"].notna().any()
    memory = [_bytes(rows["peak_memory"].mean())] if recorded else []
    return [
        Cell(row.group.name),
        _number(row.n),
        Cell(with_error(row.mean, row.standard_error, digits), row.mean),
        Cell(difference_text(row, digits), difference),
        *(
            _number(rows[column].mean(), decimals)
            for _, column, decimals in _others(content.comparison.metric.column)
        ),
        _number(rows["parameters"].iloc[0]),
        _number(rows["parameters_head"].iloc[0]),
        _UNKNOWN if budget is None else _rank(budget.rank_bound),
        _UNKNOWN if budget is None else _flops(budget.training_flops_per_token, rows),
        _number(rows["tokens_per_second"].mean()),
        *memory,
    ]


def _rank(bound: int | None) -> Cell:
    return Cell("none below V", math.inf) if bound is None else _number(bound)


def _flops(per_token: float, rows: Any) -> Cell:
    total = per_token * rows["tokens_seen"].mean()
    return Cell(f"{total:.3g}".replace("e+", "e"), total)


def _bytes(value: float) -> Cell:
    return _UNKNOWN if math.isnan(value) else Cell(f"{value / 2**20:,.0f} MiB", value)


def _losses(run: dict[str, Any]) -> list[Cell]:
    if run["state"] == "finished":
        best = Cell(f"{run['best_loss']:.4f}, {run['best_step']:,.0f}", run["best_loss"])
        own = [_number(run["loss"], 4), best, _number(run["test_loss"], 4)]
        return [*own, _number(run["bits_per_byte"], 4), _time(run["wall_seconds"])]
    if math.isnan(run["last_loss"]):
        return [_UNKNOWN] * 5
    # by itself at the end of a sorted table: it is not comparable with a finished run's
    return [Cell(f"{run['last_loss']:.4f} at {run['last_step']:,}", math.inf), *[_UNKNOWN] * 4]


def _state(run: dict[str, Any]) -> Cell:
    if run["state"] == "finished":
        return Cell("finished")
    reached = f"{run['state']}, step {run['step']:,} of {run['steps']:,}"
    return Cell(reached if run["error"] is None else f"{reached}: {run['error']}")


def _time(seconds: float) -> Cell:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return Cell(f"{hours}:{minutes:02d}:{rest:02d}", seconds)


def _number(value: float, digits: int = 0) -> Cell:
    return _UNKNOWN if math.isnan(value) else Cell(f"{value:,.{digits}f}", float(value))


def _shown(value: Any) -> str:
    return str(value) if value == ABSENT else as_text(value)


def _setting(value: Any) -> Cell:
    if value == ABSENT:
        return _UNKNOWN
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return Cell(as_text(value), float(value) if numeric else None)


def _runs(count: int) -> str:
    return f"{count} run{'s' if count != 1 else ''}"


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _provenance(run: Run) -> Iterable[tuple[str, str]]:
    yield "seed", str(run.config["seed"])
    environment = (run.result or {}).get("environment")
    if not isinstance(environment, dict):
        return
    git = environment.get("git")
    if isinstance(git, dict):
        changed = ", with changes that were not committed" if git.get("dirty") else ""
        yield "commit of headlab", f"{git.get('commit')}{changed}"
    else:
        yield "commit of headlab", "not in a repository"
    versions = environment.get("versions")
    for name, version in (versions if isinstance(versions, dict) else {}).items():
        yield name, str(version)
    for key in ("backend", "device_kind", "device_count", "platform"):
        if key in environment:
            value = environment[key]
            yield key.replace("_", " "), value if isinstance(value, str) else json.dumps(value)
