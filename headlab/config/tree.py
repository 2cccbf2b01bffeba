"""The configuration as a tree: the defaults, the flat view by dotted key, and errors about keys."""

import contextlib
import difflib
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict, FieldReference, FrozenConfigDict

from headlab.config.options import OPTIONS
from headlab.errors import UsageError


def default_config() -> ConfigDict:
    """A new configuration with the default of every option, for a config file to change.

    It refuses unknown keys and wrong types, and lets an optional value be set and unset. Only the
    `head` section is open, because each head brings options of its own: `resolve` checks those.

    >>> config = default_config()
    >>> config.head.softcap = 30.0
    >>> config.optimizer.clip_norm = None
    >>> config.train.step = 100  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    AttributeError: ...Did you mean "steps" instead of "step"...
    """
    config = ConfigDict()
    for key, option in OPTIONS.items():
        kinds = [kind for kind in typing.get_args(option.type) if kind is not type(None)]
        # a bare None would accept any type afterwards; a reference remembers the one it may hold
        optional = type(None) in typing.get_args(option.type)
        if optional:
            kind = typing.get_origin(kinds[0]) or kinds[0]  # of tuple[float, ...] it is tuple
            place(config, key, FieldReference(option.default, field_type=kind))
        else:
            place(config, key, option.default)
    config.lock()
    config.head.unlock()
    return config


def flatten(config: Mapping[str, Any] | ConfigDict) -> dict[str, Any]:
    """Every value by its dotted key, sections in alphabetical order.

    >>> flatten(default_config())["train.batch_size"]
    16
    """
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping | ConfigDict):
            flat |= {f"{name}.{key}": inner for key, inner in flatten(value).items()}
        else:
            flat[name] = value
    return flat


def freeze(values: Mapping[str, Any]) -> FrozenConfigDict:
    """The unchangeable configuration that holds the defaults, but these values by dotted key."""
    config = default_config()
    for key, value in values.items():
        place(config, key, value)
    return FrozenConfigDict(config)


def copy(config: ConfigDict) -> ConfigDict:
    """A configuration of one's own with the same values, whether the other can change or not."""
    copied = default_config()
    for key, value in flatten(config).items():
        place(copied, key, value)
    return copied


def place(config: ConfigDict, key: str, value: Any) -> None:
    """Puts a value whose type was checked under a dotted key, making the sections on the way."""
    *sections, name = key.split(".")
    for section in sections:
        if section not in config:
            _add(config, section, ConfigDict())
        config = config[section]
    if name not in config:
        _add(config, name, value)
    else:
        # a config file's own ConfigDict may hold 1 where 0.5 is allowed: the table decides
        with config.ignore_type():
            config[name] = value


def _add(config: ConfigDict, name: str, value: Any) -> None:
    # only where it must: unlocking and locking again also locks the open section of the head
    with config.unlocked() if config.is_locked else contextlib.nullcontext():
        config[name] = value


def unknown_key(key: str, known: Iterable[str], why: str = "is not an option") -> UsageError:
    """The error for a key that no option has, naming the valid key that is most like it."""
    return UsageError(
        f"{key} {why}; did you mean {nearest(key, known)}? (`headlab options` lists them all)"
    )


def nearest(key: str, known: Iterable[str]) -> str:
    """The known key most like this one; the right name in the wrong section comes first.

    >>> nearest("train.peak_rate", OPTIONS), nearest("trian.stpes", OPTIONS)
    ('optimizer.peak_rate', 'train.steps')
    """

    def likeness(other: str) -> tuple[bool, float]:
        same_leaf = key.rpartition(".")[2] == other.rpartition(".")[2]
        return same_leaf, difflib.SequenceMatcher(None, key, other).ratio()

    return max(known, key=likeness)
