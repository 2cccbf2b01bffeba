"""Blockwise softmax cross-entropy of a linear map, fused with its matrix multiplies; `[tokens, V]` is never held.

Two faces of one computation over blocks of tokens and of vocabulary rows:

* `linear_statistics` gives numbers a token (nll, lse, …), differentiable in each by recomputing the blocks (four matrix
  multiplies in all);
* `linear_loss` gives the sums that training needs and makes the gradients in the forward pass (three).

The running maximum m, s = Σ exp(t − m) and t_target − m are combined as nll = log s − (t_target − m): two large numbers
are never subtracted afterwards, so equal logits of any size still give the logarithm of their count.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from headlab.ops.varying import sum_to_like, vary_like


class LogitMap(NamedTuple):
    """Elementwise map from a raw product z = h·wᵀ + b to a logit: `c·tanh(scale·z / c)`, without a cap c `scale·z`."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, z: Array) -> Array:
        z = z * self.scale
        return z if self.softcap is None else self.softcap * jnp.tanh(z / self.softcap)

    def derivative(self, logits: Array) -> Array | float:
        """d logit / d z, written in terms of the logit: `scale · (1 − (logit / c)²)`."""
        if self.softcap is None:
            return self.scale
        ratio = logits / self.softcap
        return self.scale * (1 - ratio * ratio)


class LinearSpec(NamedTuple):
    """What a linear softmax needs beside its arrays; static under `jit`."""

    vocab_size: int  # real tokens; rows of the weight beyond it are padding
    logit_map: LogitMap = LogitMap()
    logits_dtype: str = "float32"  # the dtype that products are rounded to before the map
    token_block: int | None = None  # None: chosen by size
    vocab_block: int | None = None


class Statistics(NamedTuple):
    """Numbers a token, all [tokens], float32 at least, in nats."""

    nll: Array  # −log p(target); NaN, gradient too, where the target is outside [0, vocab_size)
    max: Array  # the largest logit; a constant to differentiation
    log_sum: Array  # log Σ exp(logits − max); lse = max + log_sum, with lse's gradient
    uniform_nll: Array  # −(1/V) Σ_v log p(v): the cross-entropy against the uniform distribution


class Sums(NamedTuple):
    """Scalars over the counted tokens, float32 at least."""

    objective: Array  # Σ (1−α)·nll + α·uniform_nll + z·lse²; the only differentiable one
    nats: Array  # Σ nll
    weight: Array  # number of counted tokens


class _Running(NamedTuple):
    """What is known of each token's logits after some blocks, all [tokens]."""

    max: Array
    sum_exp: Array  # Σ exp(t − max)
    target: Array  # t_target, 0 until its block was seen
    centred: Array  # Σ (t − max) over real rows


# A block of logits of about this many bytes stays in a CPU's outer cache; accelerators want larger matrix multiplies.
_BLOCK_BYTES = {"cpu": 8 << 20, "gpu": 128 << 20, "tpu": 64 << 20}


def block_sizes(tokens: int, rows: int, spec: LinearSpec) -> tuple[int, int]:
    """(token_block, vocab_block): the given ones, or all rows and as many tokens as a block of logits has room for."""
    budget = _BLOCK_BYTES.get(jax.default_backend(), _BLOCK_BYTES["gpu"]) // 4
    vocab_block = spec.vocab_block or min(rows, max(budget // 256, 1024))
    fitting = max(budget // min(vocab_block, rows), 8)
    # Blocks of equal size, so that no small remainder pays for a whole loop body.
    fitting = math.ceil(tokens / math.ceil(max(tokens, 1) / fitting))
    return max(1, min(spec.token_block or fitting, tokens)), min(vocab_block, rows)


def linear_statistics(
    h: Float[Array, "tokens d_model"],
    weight: Float[Array, "rows d_model"],
    bias: Float[Array, "rows"] | None,
    targets: Int[Array, "tokens"],
    spec: LinearSpec,
) -> Statistics:
    """nll, the log-partition and uniform_nll of every token, in blocks; differentiable in h, weight and bias.

    With z = h·wᵀ + b and t = map(z) over the real rows: lse = log Σ exp t = max + log_sum,
    nll = log_sum − (t_target − max).
    Operands are multiplied in the dtype of `h`, accumulated in at least float32; the backward pass recomputes each
    block. Peak memory is a block of logits and one of each gradient.
    """
    return _statistics(h, weight, bias, targets, spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _statistics(h, weight, bias, targets, spec):
    token_block, _ = block_sizes(h.shape[0], weight.shape[0], spec)

    def one(h, targets):
        return _finish(_walk(h, weight, bias, targets, spec), targets, spec)

    return _map_token_blocks(one, token_block, h, targets)


def _statistics_forward(h, weight, bias, targets, spec):
    out = _statistics(h, weight, bias, targets, spec)
    return out, (h, weight, bias, targets, out.max, out.log_sum)


def _statistics_backward(spec, residuals, cotangent: Statistics):
    h, weight, bias, targets, maximum, log_sum = residuals
    cotangent = cotangent._replace(nll=_or_nan(cotangent.nll, targets, spec))
    stats = Statistics(cotangent.nll, maximum, log_sum, cotangent.uniform_nll)
    return _gradients(h, weight, bias, targets, stats, cotangent, spec)


_statistics.defvjp(_statistics_forward, _statistics_backward)


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
    """Sums over the counted tokens of the training objective and of the pure cross-entropy, in nats.

    objective = Σ (1−α)·nll + α·uniform_nll + z_loss_weight·lse², so that with smoothing α the target gets
    1 − α + α/V and every other real token α/V. Only `objective` is differentiable: its gradients are made beside it in
    the forward pass when one is asked for, and `nats` and `weight` are constants. A token with `where` False
    contributes exactly zero to value and gradient, whatever its state or id.
    """
    objective, nats = _loss(h, weight, bias, targets, where, spec, z_loss_weight, label_smoothing)
    count = jnp.sum(where, dtype=objective.dtype)
    return Sums(objective, jax.lax.stop_gradient(nats), count)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _loss(h, weight, bias, targets, where, spec, z_loss_weight, label_smoothing):
    token_block, _ = block_sizes(h.shape[0], weight.shape[0], spec)

    def one(h, targets, where):
        h = jnp.where(where[:, None], h, 0)
        stats = _finish(_walk(h, weight, bias, targets, spec), targets, spec)
        return _objective(stats, where, z_loss_weight, label_smoothing)

    per_token = _map_token_blocks(one, token_block, h, targets, where)
    return jax.tree.map(jnp.sum, per_token)


def _objective(stats: Statistics, where, z_loss_weight: float, label_smoothing: float):
    """(objective, nll) a token, zero where not counted."""
    objective = stats.nll
    if label_smoothing:
        objective = (1 - label_smoothing) * stats.nll + label_smoothing * stats.uniform_nll
    if z_loss_weight:
        objective = objective + z_loss_weight * (stats.max + stats.log_sum) ** 2
    return jnp.where(where, objective, 0), jnp.where(where, stats.nll, 0)


def _loss_forward(h, weight, bias, targets, where, spec, z_loss_weight, label_smoothing):
    token_block, _ = block_sizes(h.shape[0], weight.shape[0], spec)
    dtype = _accumulator(h)

    def one(carry, h, targets, where):
        dweight, dbias = carry
        h = jnp.where(where[:, None], h, 0)
        running, kept = _walk_keeping(h, weight, bias, targets, spec)
        stats = _finish(running, targets, spec)
        objective, nats = _objective(stats, where, z_loss_weight, label_smoothing)
        g = where.astype(dtype)
        cotangent = Statistics(
            nll=_or_nan(g * (1 - label_smoothing), targets, spec),
            max=jnp.zeros_like(g),
            log_sum=g * 2 * z_loss_weight * (stats.max + stats.log_sum),
            uniform_nll=g * label_smoothing,
        )
        dh, dweight, dbias = _block_gradients(
            h, weight, bias, targets, stats, cotangent, spec, dweight, dbias, kept
        )
        return (dweight, dbias), (jnp.where(where[:, None], dh, 0), objective, nats)

    zeros = _zero_gradients(h, weight, bias)
    (dweight, dbias), (dh, objective, nats) = _scan_token_blocks(
        one, token_block, zeros, h, targets, where
    )
    gradients = (dh, dweight, dbias)
    return (jnp.sum(objective), jnp.sum(nats)), (gradients, h, weight, bias)


def _loss_backward(spec, z_loss_weight, label_smoothing, residuals, cotangent):
    (dh, dweight, dbias), h, weight, bias = residuals
    g, _ = cotangent  # the pure nats are reported, never differentiated
    scaled = [(g * dh).astype(h.dtype), (g * dweight).astype(weight.dtype)]
    dbias = None if bias is None else sum_to_like((g * dbias).astype(bias.dtype), bias)
    return sum_to_like(scaled[0], h), sum_to_like(scaled[1], weight), dbias, None, None


_loss.defvjp(_loss_forward, _loss_backward)


# --- one block of tokens -----------------------------------------------------------------------------------------


def _accumulator(h: Array):
    return jnp.promote_types(h.dtype, jnp.float32)


def block_logits(h, rows, bias, spec: LinearSpec) -> Array:
    """map(h · rowsᵀ + bias), [tokens, rows], float32 at least; products are rounded to `logits_dtype` first."""
    rounded = (
        jnp.promote_types(spec.logits_dtype, h.dtype)
        if h.dtype == jnp.float64
        else spec.logits_dtype
    )
    z = jax.lax.dot_general(
        h, rows.astype(h.dtype), (((1,), (1,)), ((), ())), preferred_element_type=rounded
    ).astype(_accumulator(h))
    if bias is not None:
        z = z + bias.astype(z.dtype)
    return spec.logit_map(z)


def _vocab_blocks(spec: LinearSpec, rows: int, vocab_block: int):
    """(number of whole blocks, size of the remainder)."""
    return rows // vocab_block, rows % vocab_block


def _slice(weight, bias, start, size):
    if size == weight.shape[0]:
        return weight, bias
    rows = jax.lax.dynamic_slice_in_dim(weight, start, size)
    return rows, None if bias is None else jax.lax.dynamic_slice_in_dim(bias, start, size)


def _advance(running: _Running, logits, ids, targets, spec: LinearSpec) -> _Running:
    """Takes one block of logits into the running statistics; padded rows count for nothing."""
    real = ids < spec.vocab_size
    shown = jnp.where(real, logits, -jnp.inf)
    new_max = jnp.maximum(running.max, jnp.max(shown, axis=1))
    # A block (or all so far) may hold padding only: its maximum is −inf, and 0 is subtracted in its place.
    old, new = _finite(running.max), _finite(new_max)
    seen = jnp.minimum(ids[0], spec.vocab_size).astype(logits.dtype)
    centred = jnp.sum(jnp.where(real, logits - new[:, None], 0), axis=1)
    return _Running(
        new_max,
        # exp(−inf − new) = 0 where nothing was seen; exp(0 − new) would overflow when all logits are very negative.
        running.sum_exp * jnp.exp(running.max - new)
        + jnp.sum(jnp.exp(shown - new[:, None]), axis=1),
        running.target + jnp.sum(jnp.where(ids == targets[:, None], logits, 0), axis=1),
        running.centred + seen * (old - new) + centred,
    )


def _finite(x: Array) -> Array:
    return jnp.where(jnp.isneginf(x), 0, x)


def _start(h, weight, bias) -> _Running:
    zero = jnp.zeros(h.shape[0], _accumulator(h))
    like = (h, weight) if bias is None else (h, weight, bias)
    return _Running(*(vary_like(x, *like) for x in (zero - jnp.inf, zero, zero, zero)))


def _walk(h, weight, bias, targets, spec: LinearSpec) -> _Running:
    """The running statistics of a block of tokens after all blocks of the vocabulary."""
    return _walk_keeping(h, weight, bias, targets, spec)[0]


def _walk_keeping(h, weight, bias, targets, spec: LinearSpec):
    """`_walk`, and the logits where the whole vocabulary was one block (None where they must be made again)."""
    rows = weight.shape[0]
    _, size = block_sizes(h.shape[0], rows, spec)
    whole, rest = _vocab_blocks(spec, rows, size)
    kept = None

    def step(running, start, size):
        block, block_bias = _slice(weight, bias, start, size)
        logits = block_logits(h, block, block_bias, spec)
        ids = start + jnp.arange(size, dtype=jnp.int32)
        return _advance(running, logits, ids, targets, spec), logits

    running = _start(h, weight, bias)
    if whole == 1:
        running, kept = step(running, 0, size)
        kept = None if rest else kept
    else:
        starts = jnp.arange(whole, dtype=jnp.int32) * size
        running, _ = jax.lax.scan(lambda r, s: (step(r, s, size)[0], None), running, starts)
    if rest:
        running, _ = step(running, whole * size, rest)
    return running, kept


def _finish(running: _Running, targets, spec: LinearSpec) -> Statistics:
    shift = _finite(running.max)
    log_sum = jnp.log(running.sum_exp)
    nll = jnp.where(_known(targets, spec), log_sum - (running.target - shift), jnp.nan)
    return Statistics(nll, shift, log_sum, log_sum - running.centred / spec.vocab_size)


def _known(targets, spec: LinearSpec):
    return (targets >= 0) & (targets < spec.vocab_size)


def _or_nan(g, targets, spec: LinearSpec):
    """A cotangent of nll, NaN where nll is NaN for its target and somebody counts it."""
    return jnp.where(_known(targets, spec) | (g == 0), g, jnp.nan)


def _block_gradients(
    h,
    weight,
    bias,
    targets,
    stats: Statistics,
    g: Statistics,
    spec: LinearSpec,
    dweight,
    dbias,
    kept,
):
    """(dh, dweight + this block's, dbias + this block's) for the cotangents `g` a token.

    d/dt_v of the cotangent-weighted statistics: (g_nll + g_log_sum + g_uniform)·p_v − g_nll·[v = target] − g_uniform/V.
    """
    rows = weight.shape[0]
    _, size = block_sizes(h.shape[0], rows, spec)
    whole, rest = _vocab_blocks(spec, rows, size)
    share = g.nll + g.log_sum + g.uniform_nll

    def step(carry, start, size, logits=None):
        dh, dweight, dbias = carry
        block, block_bias = _slice(weight, bias, start, size)
        if logits is None:
            logits = block_logits(h, block, block_bias, spec)
        ids = start + jnp.arange(size, dtype=jnp.int32)
        dlogits = share[:, None] * jnp.exp((logits - stats.max[:, None]) - stats.log_sum[:, None])
        dlogits = dlogits - jnp.where(ids == targets[:, None], g.nll[:, None], 0)
        dlogits = dlogits - (g.uniform_nll / spec.vocab_size)[:, None]
        dz = jnp.where(ids < spec.vocab_size, dlogits * spec.logit_map.derivative(logits), 0)
        dz_small = dz.astype(h.dtype)
        accumulate = dict(preferred_element_type=_accumulator(h))
        dh = dh + jax.lax.dot_general(
            dz_small, block.astype(h.dtype), (((1,), (0,)), ((), ())), **accumulate
        )
        drows = jax.lax.dot_general(dz_small, h, (((0,), (0,)), ((), ())), **accumulate)
        dweight = _add_rows(dweight, drows, start)
        if dbias is not None:
            dbias = _add_rows(dbias, jnp.sum(dz, axis=0), start)
        return dh, dweight, dbias

    carry = (vary_like(jnp.zeros(h.shape, _accumulator(h)), dweight), dweight, dbias)
    if kept is not None:
        return step(carry, 0, size, kept)
    starts = jnp.arange(whole, dtype=jnp.int32) * size
    carry, _ = jax.lax.scan(lambda c, s: (step(c, s, size), None), carry, starts)
    return step(carry, whole * size, rest) if rest else carry


def _add_rows(total, rows, start):
    if rows.shape == total.shape:
        return total + rows
    old = jax.lax.dynamic_slice_in_dim(total, start, rows.shape[0])
    return jax.lax.dynamic_update_slice_in_dim(total, old + rows, start, axis=0)


def _zero_gradients(h, weight, bias):
    like = (h, weight) if bias is None else (h, weight, bias)
    dweight = vary_like(jnp.zeros(weight.shape, _accumulator(h)), *like)
    return dweight, None if bias is None else vary_like(
        jnp.zeros(bias.shape, _accumulator(h)), *like
    )


def _gradients(h, weight, bias, targets, stats: Statistics, g: Statistics, spec: LinearSpec):
    """Gradients of the statistics by recomputing every block."""
    token_block, _ = block_sizes(h.shape[0], weight.shape[0], spec)

    def one(carry, h, targets, stats, g):
        dh, dweight, dbias = _block_gradients(
            h, weight, bias, targets, stats, g, spec, carry[0], carry[1], None
        )
        return (dweight, dbias), dh

    zeros = _zero_gradients(h, weight, bias)
    (dweight, dbias), dh = _scan_token_blocks(one, token_block, zeros, h, targets, stats, g)
    dbias = None if bias is None else sum_to_like(dbias.astype(bias.dtype), bias)
    return (
        sum_to_like(dh.astype(h.dtype), h),
        sum_to_like(dweight.astype(weight.dtype), weight),
        dbias,
        None,
    )


# --- blocks of tokens --------------------------------------------------------------------------------------------


def _map_token_blocks(one, block: int, *arrays):
    """`one` on blocks of the leading axis, results joined; the last block may be smaller."""
    return _scan_token_blocks(lambda carry, *a: (carry, one(*a)), block, (), *arrays)[1]


def _scan_token_blocks(one, block: int, carry, *arrays):
    """`jax.lax.scan` of `one(carry, *blocks)` over blocks of the leading axis and a smaller last one."""
    tokens = jax.tree.leaves(arrays)[0].shape[0]
    whole = tokens // block * block
    if tokens <= block:
        return one(carry, *arrays)
    blocks = jax.tree.map(lambda a: a[:whole].reshape(-1, block, *a.shape[1:]), arrays)
    carry, outs = jax.lax.scan(lambda c, a: one(c, *a), carry, blocks)
    outs = jax.tree.map(lambda a: a.reshape(whole, *a.shape[2:]), outs)
    if whole < tokens:
        carry, last = one(carry, *jax.tree.map(lambda a: a[whole:], arrays))
        outs = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), outs, last)
    return carry, outs
