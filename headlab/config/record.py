"""Configurations as records: exact JSON, a hash of what they compute, how two of them differ."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict, FrozenConfigDict

from headlab.config.options import OPERATIONAL, OPTIONS
from headlab.config.rules import checked
from headlab.config.tree import flatten, freeze, unknown_key
from headlab.errors import UsageError

ABSENT = "(absent)"  # stands in `differences` for the value of a key that one side lacks


def to_json(config: ConfigDict) -> str:
    """The configuration as JSON text, nested by section; `from_json` reads exactly the same back.

    Raises:
      TypeError: a value that JSON cannot hold exactly; a resolved configuration has none.
    """
    values = flatten(config)
    for key, value in values.items():
        for item in value if isinstance(value, tuple) else (value,):
            if type(item) not in (bool, int, float, str, type(None)):
                raise TypeError(
                    f"{key}={value!r} cannot be recorded; resolve the configuration first"
                )
    return json.dumps(_nested(values), indent=2, sort_keys=True, allow_nan=False) + "\n"


def from_json(text: str) -> FrozenConfigDict:
    """The configuration that `to_json` wrote; an option that did not exist then has its default.

    A head's own options are taken as they are: opening a run imports no head for them.

    Raises:
      UsageError: the text is not JSON, or holds an unknown key or a value of the wrong type.
    """
    return freeze(values_from_json(text))


def values_from_json(text: str) -> dict[str, Any]:
    """Every value of the configuration that `from_json` gives, by dotted key, much faster.

    Raises:
      UsageError: the text is not JSON, or holds an unknown key or a value of the wrong type.
    """
    try:
        tree = json.loads(text)
    except ValueError as problem:
        raise UsageError(
            f"the recorded configuration is not valid JSON ({problem}); restore it from a copy"
        ) from None
    if not isinstance(tree, dict):
        raise UsageError(
            f"the recorded configuration is a JSON {type(tree).__name__}, not an object; restore "
            "it from a copy"
        )
    values = {key: option.default for key, option in OPTIONS.items()}
    for key, value in flatten(tree).items():
        if key in OPTIONS:
            values[key] = checked(key, value, OPTIONS[key])
        elif key.startswith("head."):
            values[key] = tuple(value) if isinstance(value, list) else value
        else:
            raise unknown_key(key, OPTIONS, "in the recorded configuration is not an option")
    return values


def config_hash(config: ConfigDict) -> str:
    """16 hexadecimal digits, equal for runs that compute the same: operational keys aside.

    A config from before there was an option has the digits of one with its default.
    """
    values = {
        key: value
        for key, value in flatten(config).items()
        if not is_operational(key) and not _as_before(key, value)
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _as_before(key: str, value: Any) -> bool:
    option = OPTIONS.get(key)
    return option is not None and option.later and value == option.default


def differences(
    a: ConfigDict, b: ConfigDict, *, operational: bool = False
) -> dict[str, tuple[Any, Any]]:
    """The (value in a, value in b) of every key that differs, ABSENT where one has no such key.

    Operational keys (see OPERATIONAL) may differ when a run is reopened: they are left out unless
    `operational`, which gives those alone.

    >>> from headlab.config import default_config
    >>> other = default_config()
    >>> other.train.steps = 10
    >>> differences(default_config(), other)
    {'train.steps': (6000, 10)}
    """
    left, right = flatten(a), flatten(b)
    pairs = {key: (left.get(key, ABSENT), right.get(key, ABSENT)) for key in sorted(left | right)}
    return {
        key: (one, other)
        for key, (one, other) in pairs.items()
        if is_operational(key) == operational and (one != other or type(one) is not type(other))
    }


def is_operational(key: str) -> bool:
    """Whether the key says how a run is carried out, so that it may differ when it is reopened."""
    return key.startswith(OPERATIONAL)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree
