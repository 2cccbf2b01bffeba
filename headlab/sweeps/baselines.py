"""Which group each group is compared with."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from headlab.config import ABSENT
from headlab.config.values import as_text
from headlab.errors import UsageError
from headlab.sweeps.groups import KINDS, Group, is_setting, label, short_keys


class Baseline(NamedTuple):
    """What a group is compared with: a group (maybe itself), or the reason why with none."""

    group: Group | None
    why_none: str = ""


def choose_baseline(
    groups: Sequence[Group], asked: str | Mapping[str, Any] | None, frame: pd.DataFrame
) -> list[Baseline]:
    """The baseline of each group.

    With keys and values: of the groups that have these values, the one whose other values are the group's own, so
    that head=tied pairs widths of 64 with 64 and of 128 with 128. A value that only one of the two heads has is no
    difference. With a name, or None for the first group: that group for all.

    Raises:
      UsageError: no group is meant, or several are.
    """
    if asked is None:
        return [Baseline(groups[0])] * len(groups)
    if isinstance(asked, str):
        named = _named(groups, asked, frame)
        if named is not None:
            return [Baseline(named)] * len(groups)
        asked = _parse(asked, groups)
    keys = [key for key in frame.columns if is_setting(key)]
    wanted = {_full_key(key, keys): value for key, value in asked.items()}
    candidates = [
        group
        for group in groups
        if all(_same(_value(group, key), value) for key, value in wanted.items())
    ]
    if not candidates:
        given = ", ".join(f"{key}={_text(value)}" for key, value in asked.items())
        raise UsageError(
            f"the baseline {given} is none of the groups that have finished runs: {_listed(groups)}"
        )
    return [_matching(group, candidates, list(wanted)) for group in groups]


def _named(groups: Sequence[Group], name: str, frame: pd.DataFrame) -> Group | None:
    if name in set(frame.loc[frame["state"] != "finished", "name"]):
        raise UsageError(f"the baseline {name!r} has not finished: resume it, or name another run")
    return next((g for g in groups if name == g.name or name in set(g.rows["name"])), None)


def _parse(text: str, groups: Sequence[Group]) -> dict[str, Any]:
    pairs = [part.partition("=") for part in re.split(r",(?![^(]*\))", text)]
    if not all(equals for _, equals, _ in pairs):
        raise UsageError(
            f"the baseline {text!r} is neither KEY=VALUE nor the name of a run or of a group with finished runs: "
            f"{_listed(groups)}"
        )
    return {key.strip(): value.strip() for key, _, value in pairs}


def _matching(group: Group, candidates: Sequence[Group], wanted: Sequence[str]) -> Baseline:
    if any(group is candidate for candidate in candidates):
        return Baseline(group)
    others = [key for key in group.values if key not in wanted and key not in KINDS]
    found = [c for c in candidates if all(_agree(group, c, key) for key in others)]
    if len(found) > 1:
        raise UsageError(
            f"the baseline of {group.name} could be {_listed(found)}: give more keys, as in "
            f"--baseline='{found[0].name}'"
        )
    if found:
        return Baseline(found[0])
    own = label({key: group.values[key] for key in others})
    return Baseline(None, f"there is no baseline with {own}")


def _agree(a: Group, b: Group, key: str) -> bool:
    values = _text(_value(a, key)), _text(_value(b, key))
    return values[0] == values[1] or ABSENT in values


def _value(group: Group, key: str) -> Any:
    return group.rows[key].iloc[0]


def _full_key(key: str, keys: Sequence[str]) -> str:
    """The key that is meant by a dotted key or by the last part of one."""
    short = short_keys(keys)
    found = [full for full in keys if key in (full, short[full])]
    if not found:
        raise UsageError(
            f"the baseline's {key} does not differ between these runs; what differs is "
            f"{', '.join(keys) or 'nothing but the seed'}"
        )
    return found[0]


def _same(value: Any, wanted: Any) -> bool:
    if _text(value) == _text(wanted):
        return True
    try:  # 1e-3 is 0.001
        return not isinstance(value, bool) and float(value) == float(wanted)
    except (TypeError, ValueError):
        return False


def _text(value: Any) -> str:
    return as_text(tuple(value) if isinstance(value, list) else value)


def _listed(groups: Sequence[Group]) -> str:
    return "; ".join(group.name for group in groups)
