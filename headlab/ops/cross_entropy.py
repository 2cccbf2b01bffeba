"""Softmax cross-entropy of a linear map, fused with its matrix multiplies; `[tokens, V]` is never held."""

import math
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from headlab.ops.linear_logits import LinearSpec, LogitMap
from headlab.ops.running import Statistics
from headlab.ops.shards import shard_count
from headlab.ops.softmax_blocks import Sums, softmax_loss, softmax_statistics


def linear_cross_entropy(
    h: Float[Array, "*batch d_model"],
    weight: Float[Array, "rows d_model"],
    targets: Int[Array, "*batch"],
    *,
    bias: Float[Array, "rows"] | None = None,
    where: Bool[Array, "*batch"] | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
    vocab_size: int | None = None,
    reduction: Literal["sum", "mean", "none"] = "sum",
    return_lse: bool = False,
    token_block: int | None = None,
    vocab_block: int | None = None,
) -> Any:
    """The cross-entropy of softmax(map(h · weightᵀ + bias)) at the targets, in nats.

    With t the logits over the first `vocab_size` rows and lse = log Σ_v exp t_v, a position's value is
    Σ_v q_v·(lse − t_v) + z_loss_weight·lse², where q gives the target 1 − α + α/V and every other token α/V
    (α = `label_smoothing`). map(z) is c·tanh(logit_scale·z / c) with `softcap` c, else logit_scale·z.

    Args:
        h: hidden states, float32, bfloat16, float16 or float64. Operands are multiplied in their dtype, whatever the
            weight's, and accumulated in float32 (float64 for float64).
        weight: a row a token, `[rows, d_model]`; rows from `vocab_size` on are padding and get nothing.
        targets: token ids in [0, vocab_size). An id outside gives NaN at a counted position.
        where: the positions that count; None for all. Others contribute exactly 0 to value and gradient, whatever their
            id and state.
        vocab_size: real rows; None for all.
        reduction: "sum" and "mean" over the counted positions, or "none" for `[...]` (0 where not counted). The mean of
            no position is undefined: NaN, with a gradient of exactly 0.
        return_lse: returns (value, lse), lse `[...]`, 0 where not counted; both differentiable.
        token_block, vocab_block: sizes of the blocks in which logits are made; None chooses by size and device. They
            change rounding alone.

    Returns:
        The value, or (value, lse); float32 (float64 for float64).

    Where all rows are few enough for one block, "sum" and "mean" make their gradients in the forward pass, by three
    matrix multiplies; else blocks of logits are made again in the backward pass, four in all, and peak memory beyond
    inputs and gradients is a block of logits and its gradients. `vmap`, `jit`, `jax.checkpoint` and reverse-mode
    derivatives of any order work; JAX refuses forward-mode ones with a TypeError.

    In the body of a `jax.shard_map` (with `check_vma=True`) whose weight and bias are sharded by rows over the mesh
    axis "vocab", h and targets being whole, the value is that of all rows and equal on all shards; `vocab_size` counts
    the real rows of all.

    Raises:
        ValueError: shapes that do not fit, or an option outside its range. TypeError: a dtype that does not fit.

    >>> h, weight = jnp.array([[1.0, 0.0]]), jnp.log(jnp.array([[3.0, 1.0], [1.0, 1.0]]))
    >>> f"{linear_cross_entropy(h, weight, jnp.array([0])):.4f}"  # −ln(3 / (3 + 1))
    '0.2877'
    """
    _check_arrays(h, weight, targets, bias, where)
    _check_options(label_smoothing, z_loss_weight, reduction, token_block, vocab_block)
    spec = linear_spec(weight, softcap, logit_scale, vocab_size, token_block, vocab_block)
    counted = jnp.ones(targets.shape, bool) if where is None else where
    flat, mask = h.reshape(-1, h.shape[-1]), counted.reshape(-1)
    rows, ids = (weight, bias), targets.reshape(-1)
    if reduction == "none" or return_lse:
        flat = jnp.where(mask[:, None], flat, 0)
        stats = softmax_statistics(flat, rows, jnp.where(mask, ids, 0), spec)
        lse = jnp.where(mask, stats.max + stats.log_sum, 0)
        value = (1 - label_smoothing) * stats.nll + label_smoothing * stats.uniform_nll
        value = jnp.where(mask, value, 0) + z_loss_weight * lse**2
        count = jnp.sum(mask, dtype=value.dtype)
        value = value.reshape(targets.shape) if reduction == "none" else jnp.sum(value)
    else:
        value, _, count = softmax_loss(
            flat,
            rows,
            ids,
            mask,
            spec,
            z_loss_weight=z_loss_weight,
            label_smoothing=label_smoothing,
        )
    if reduction == "mean":
        value = jnp.where(count > 0, value / jnp.maximum(count, 1), jnp.nan)
    return (value, lse.reshape(targets.shape)) if return_lse else value


def linear_statistics(
    h: Float[Array, "tokens d_model"],
    weight: Float[Array, "rows d_model"],
    bias: Float[Array, "rows"] | None,
    targets: Int[Array, "tokens"],
    spec: LinearSpec,
) -> Statistics:
    """`softmax_statistics` of the logits map(h · weightᵀ + bias)."""
    return softmax_statistics(h, (weight, bias), targets, spec)


def linear_loss(
    h: Float[Array, "tokens d_model"],
    weight: Float[Array, "rows d_model"],
    bias: Float[Array, "rows"] | None,
    targets: Int[Array, "tokens"],
    where: Bool[Array, "tokens"],
    spec: LinearSpec,
    *,
    z_loss_weight: float = 0.0,
    label_smoothing: float = 0.0,
) -> Sums:
    """`softmax_loss` of the logits map(h · weightᵀ + bias)."""
    return softmax_loss(
        h,
        (weight, bias),
        targets,
        where,
        spec,
        z_loss_weight=z_loss_weight,
        label_smoothing=label_smoothing,
    )


def check_linear(h: Array, weight: Array, bias: Array | None) -> None:
    """Raises ValueError or TypeError unless h [..., d], weight [rows, d] and bias [rows] fit each other."""
    for name, array in (("h", h), ("weight", weight), ("bias", bias)):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name} is {array.dtype}; it must hold floating-point numbers")
    if weight.ndim != 2 or h.ndim < 1 or h.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"h is {h.shape} and weight {weight.shape}; they must be [..., d_model] and [rows, d_model]"
        )
    if not weight.shape[0]:
        raise ValueError(f"weight is {weight.shape}; it needs a row for each token, at least one")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias is {bias.shape}; it must be {weight.shape[:1]}, one for each row")


def _check_arrays(h, weight, targets, bias, where) -> None:
    check_linear(h, weight, bias)
    if targets.shape != h.shape[:-1]:
        raise ValueError(
            f"h is {h.shape} and targets {targets.shape}; they must be [..., d_model] and [...]"
        )
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(f"targets are {targets.dtype}; they must be integer token ids")
    if where is not None and (where.shape != targets.shape or where.dtype != jnp.bool_):
        raise ValueError(
            f"where is {where.dtype}{where.shape}; it must be bool{targets.shape}, like targets"
        )


def _check_options(label_smoothing, z_loss_weight, reduction, token_block, vocab_block) -> None:
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be in [0, 1)")
    if not 0 <= z_loss_weight < math.inf:
        raise ValueError(f"z_loss_weight is {z_loss_weight}; it must be 0 or more, and finite")
    if reduction not in ("sum", "mean", "none"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'sum', 'mean' or 'none'")
    for name, size in (("token_block", token_block), ("vocab_block", vocab_block)):
        if size is not None and size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1, or None to choose by size")


def linear_spec(
    weight: Array,
    softcap: float | None,
    logit_scale: float,
    vocab_size: int | None,
    token_block: int | None = None,
    vocab_block: int | None = None,
) -> LinearSpec:
    """The spec of these options; ValueError where one is outside its range."""
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap is {softcap}; it must be positive and finite, or None")
    if logit_scale == 0 or not abs(logit_scale) < math.inf:
        raise ValueError(f"logit_scale is {logit_scale}; it must be finite and not 0")
    rows = weight.shape[0] * shard_count(weight)
    real = rows if vocab_size is None else vocab_size
    if not 1 <= real <= rows:
        raise ValueError(
            f"vocab_size is {vocab_size}; weight has {rows} rows, so it must be in 1 … {rows}"
        )
    return LinearSpec(
        real,
        LogitMap(logit_scale, softcap),
        token_block=token_block,
        vocab_block=vocab_block,
    )
