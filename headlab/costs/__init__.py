"""Parameters, floating-point operations and bytes, by arithmetic alone; no JAX, no file but a config.json."""

from headlab.costs.architecture import Architecture
from headlab.costs.arithmetic import (
    HeadCost,
    Mode,
    body_flops_per_token,
    linear_head_cost,
    passes,
)
from headlab.costs.chips import CHIPS, Chip, chip, peak_flops
from headlab.costs.huggingface import read_architecture, read_config
from headlab.costs.model_cost import ModelCost, Setting, model_cost
from headlab.costs.presets import PRESETS, preset

__all__ = [
    "CHIPS",
    "PRESETS",
    "Architecture",
    "Chip",
    "HeadCost",
    "Mode",
    "ModelCost",
    "Setting",
    "body_flops_per_token",
    "chip",
    "linear_head_cost",
    "model_cost",
    "passes",
    "peak_flops",
    "preset",
    "read_architecture",
    "read_config",
]
