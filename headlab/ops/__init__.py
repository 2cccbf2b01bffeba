"""Pure functions on arrays, with explicit gradients where they pay: no Flax, no configuration."""

from headlab.ops.attention import causal_attention, softmax
from headlab.ops.cross_entropy import (
    LinearSpec,
    LogitMap,
    Statistics,
    Sums,
    linear_loss,
    linear_statistics,
)
from headlab.ops.linear import linear
from headlab.ops.top_k import empty_top_k, merge_top_k
from headlab.ops.varying import sum_to_like, vary_like, varying_axes

__all__ = [
    "LinearSpec",
    "LogitMap",
    "Statistics",
    "Sums",
    "causal_attention",
    "empty_top_k",
    "linear",
    "linear_loss",
    "linear_statistics",
    "merge_top_k",
    "softmax",
    "sum_to_like",
    "vary_like",
    "varying_axes",
]
