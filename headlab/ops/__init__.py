"""Pure functions on arrays, with explicit gradients where they pay: no Flax, no configuration."""

from headlab.ops.attention import cached_attention, causal_attention, softmax
from headlab.ops.cross_entropy import linear_cross_entropy, linear_loss, linear_statistics
from headlab.ops.linear import linear
from headlab.ops.linear_logits import LinearSpec, LogitMap, block_logits
from headlab.ops.running import Spec, Statistics
from headlab.ops.softmax_blocks import Sums, softmax_loss, softmax_statistics
from headlab.ops.softmax_tree import sum_by_blocks
from headlab.ops.token_report import TokenReport, softmax_report
from headlab.ops.top_k import best_of_shards, empty_top_k, merge_top_k, top_k
from headlab.ops.varying import sum_to_like, vary_like, varying_axes

__all__ = [
    "LinearSpec",
    "LogitMap",
    "Spec",
    "Statistics",
    "Sums",
    "TokenReport",
    "best_of_shards",
    "block_logits",
    "cached_attention",
    "causal_attention",
    "empty_top_k",
    "linear",
    "linear_cross_entropy",
    "linear_loss",
    "linear_statistics",
    "merge_top_k",
    "softmax",
    "softmax_loss",
    "softmax_report",
    "softmax_statistics",
    "sum_by_blocks",
    "sum_to_like",
    "top_k",
    "vary_like",
    "varying_axes",
]
