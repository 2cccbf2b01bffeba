"""Runs that differ in the seed alone form a group; a group is named by what tells it from the others."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from headlab.config import ABSENT, OPERATIONAL, OPTIONS
from headlab.config.values import as_text
from headlab.errors import UsageError

KINDS = ("text", "tokenizer")
"""Columns that are no configuration, but without which runs are not repetitions of each other."""


class Group(NamedTuple):
    """Finished runs that differ in the seed alone."""

    name: str
    values: dict[str, Any]  # of the keys that tell the groups apart
    rows: pd.DataFrame  # those of the runs, indexed by seed


def grouped(frame: pd.DataFrame) -> list[Group]:
    """The groups of the finished runs of a table of `load`, in the order of their first runs.

    How a run was carried out (logging, checkpoints, the evaluation batch) tells no groups apart; on which mesh
    does.

    Raises:
      UsageError: two runs are of one group and one seed, and so are no repetitions of each other.
    """
    finished = frame[frame["state"] == "finished"]
    keys = group_keys(finished)
    members: dict[tuple[Any, ...], list[int]] = {}
    for number, found in enumerate(zip(*(finished[key] for key in keys), strict=True)):
        members.setdefault(tuple(map(_identity, found)), []).append(number)
    told_by = _telling(finished, keys, list(members.values()))
    groups = []
    for numbers in members.values():
        rows = finished.iloc[numbers]
        values = {key: rows[key].iloc[0] for key in told_by} or {"head.name": rows["head"].iloc[0]}
        groups.append(Group(label(values), values, _by_seed(rows)))
    return groups


def group_keys(frame: pd.DataFrame) -> list[str]:
    """The columns that tell groups apart: configuration values, but for the seed, and KINDS."""
    return [key for key in frame.columns if is_setting(key) or key in KINDS]


def is_setting(column: str) -> bool:
    """Whether a column of the table is a configuration value that groups may differ in."""
    carried_out = column.startswith(OPERATIONAL) and not column.startswith("mesh.")
    return "." in column and not carried_out


def label(values: Mapping[str, Any]) -> str:
    """A group's name: "head=mixture_of_softmaxes, n_experts=4"; options that it has not are left out.

    >>> label({"head.name": "tied", "head.n_experts": "(absent)", "model.d_model": 64})
    'head=tied, d_model=64'
    """
    shown = {key: value for key, value in values.items() if _identity(value) != _identity(ABSENT)}
    short = short_keys(list(values))
    return ", ".join(f"{short[key]}={as_text(value)}" for key, value in shown.items())


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each dotted key where it is the only such one; "head" for head.name.

    >>> short_keys(["head.name", "model.bias", "head.bias", "train.steps"])
    {'head.name': 'head', 'model.bias': 'model.bias', 'head.bias': 'head.bias', 'train.steps': 'steps'}
    """
    last = {key: "head" if key == "head.name" else key.rpartition(".")[2] for key in keys}
    names = list(last.values())
    return {key: name if names.count(name) == 1 else key for key, name in last.items()}


def _telling(
    frame: pd.DataFrame, keys: Sequence[str], members: Sequence[Sequence[int]]
) -> list[str]:
    """The fewest of the keys, taken in order, that tell all groups apart: others follow from them."""
    firsts = frame.iloc[[numbers[0] for numbers in members]]
    order = [*(key for key in keys if key in OPTIONS), *(key for key in keys if key not in OPTIONS)]
    chosen: list[str] = []
    parts = {(): len(firsts)}
    for key in sorted(order, key=lambda key: key != "head.name"):
        if len(parts) == len(firsts):
            break
        columns = [map(_identity, firsts[k]) for k in (*chosen, key)]
        finer: dict[Any, int] = {}
        for combination in zip(*columns, strict=True):
            finer[combination] = finer.get(combination, 0) + 1
        if len(finer) > len(parts):
            chosen, parts = [*chosen, key], finer
    return chosen


def _by_seed(rows: pd.DataFrame) -> pd.DataFrame:
    twice = rows[rows["seed"].duplicated(keep=False)]
    if len(twice):
        raise UsageError(
            f"{' and '.join(twice['path'][:2])} are runs of one configuration and one seed, "
            f"{twice['seed'].iloc[0]}: counted as two they would make the uncertainty look smaller than it is. "
            "Name one of them."
        )
    return rows.set_index("seed", drop=False).rename_axis(None)


def _identity(value: Any) -> tuple[str, Any]:
    return type(value).__name__, value
