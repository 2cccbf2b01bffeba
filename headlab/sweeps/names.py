"""Readable names of points, made of the options that they set: `head=tied,seed=0`."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headlab.config.values import as_text

BASE = "base"  # the point that sets nothing
_LONGEST = 120  # characters; file systems allow 255 bytes, and files beside a run need some


def names(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each point, safe as the name of a directory.

    It has a part KEY=VALUE for each option that the point sets. KEY is the section of an option `….name`, else the last
    part of the option's key, or the whole key where another option that some point sets would be called the same. What
    a file name should not hold becomes "-", and a long name ends in a hash in place of its last part.

    >>> names([{"head.name": "tied", "optimizer.peak_rate": 0.01, "seed": 0}])
    ['head=tied,peak_rate=0.01,seed=0']
    """
    labels = short_keys(list(dict.fromkeys(key for point in points for key in point)))
    return [_name({labels[key]: value for key, value in point.items()}) for point in points]


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """What each option is called: "head" for head.name, else the last part, or all where another would be called so.

    >>> short_keys(["head.name", "model.bias", "head.bias", "train.steps"])
    {'head.name': 'head', 'model.bias': 'model.bias', 'head.bias': 'head.bias', 'train.steps': 'steps'}
    """
    short = {key: _short(key) for key in keys}
    called = list(short.values())
    return {key: label if called.count(label) == 1 else key for key, label in short.items()}


def _short(key: str) -> str:
    section, _, last = key.rpartition(".")
    return section.rpartition(".")[2] if last == "name" and section else last


def _name(parts: Mapping[str, Any]) -> str:
    text = ",".join(f"{label}={as_text(value)}" for label, value in parts.items()) or BASE
    safe = re.sub(r"[^\w.,=+()-]+", "-", text, flags=re.ASCII)
    if len(safe) <= _LONGEST:
        return safe
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{safe[: _LONGEST - len(digest) - 1]}-{digest}"
