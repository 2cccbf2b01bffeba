"""Configuration: one table of every option, config files, overrides, checks and records.

A config file changes `default_config()`; `load` applies overrides and resolves it, which fills in
what follows from other values and refuses what cannot be, before any work begins.
"""

from headlab.config.describe import Description, describe
from headlab.config.loading import call_in_file, load, override, put, read
from headlab.config.options import OPERATIONAL, OPTIONS, Option
from headlab.config.record import (
    ABSENT,
    config_hash,
    differences,
    from_json,
    to_json,
    values_from_json,
)
from headlab.config.rules import (
    Biases,
    biases,
    check_mesh,
    head_width,
    replace,
    resolve,
    untie_step,
)
from headlab.config.tree import copy, default_config, flatten

__all__ = [
    "ABSENT",
    "OPERATIONAL",
    "OPTIONS",
    "Biases",
    "Description",
    "Option",
    "biases",
    "call_in_file",
    "check_mesh",
    "config_hash",
    "copy",
    "default_config",
    "describe",
    "differences",
    "flatten",
    "from_json",
    "head_width",
    "load",
    "override",
    "put",
    "read",
    "replace",
    "resolve",
    "to_json",
    "untie_step",
    "values_from_json",
]
