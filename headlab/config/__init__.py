"""Configuration: one table of every option, config files, overrides, checks and records.

A config file changes `default_config()`; `load` applies overrides and resolves it, which fills in
what follows from other values and refuses what cannot be, before any work begins.
"""

from headlab.config.describe import Description, describe
from headlab.config.loading import load, override
from headlab.config.options import OPERATIONAL, OPTIONS, Option
from headlab.config.record import (
    ABSENT,
    config_hash,
    differences,
    from_json,
    to_json,
    values_from_json,
)
from headlab.config.rules import check_mesh, replace, resolve, untie_step
from headlab.config.tree import default_config, flatten

__all__ = [
    "ABSENT",
    "OPERATIONAL",
    "OPTIONS",
    "Description",
    "Option",
    "check_mesh",
    "config_hash",
    "default_config",
    "describe",
    "differences",
    "flatten",
    "from_json",
    "load",
    "override",
    "replace",
    "resolve",
    "to_json",
    "untie_step",
    "values_from_json",
]
