"""One blockwise softmax statistic under all heads; `[tokens, V]` is never held.

It walks over blocks of tokens and of vocabulary rows. What a logit is, a `Spec` says: a product of states and rows for
linear heads, a few products mixed for others. Two faces of one computation:

* `softmax_statistics` gives numbers a token (nll, lse, …), differentiable in each by making the blocks again, with the
  vocabulary outermost: no more is held than a block of logits, whatever the sizes;
* `softmax_loss` gives the sums that training needs. Where all rows are few enough for one block, it makes the gradients
  beside them (three matrix multiplies in place of four), with the tokens outermost.

The running maximum m, s = Σ exp(t − m) and t_target − m are combined as nll = log s − (t_target − m): two large numbers
are never subtracted afterwards, so equal logits of any size still give the logarithm of their count.
"""

import functools
import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from headlab.ops.linear_logits import accumulator
from headlab.ops.token_blocks import (
    add_rows,
    as_bits,
    fold_slices,
    from_bits,
    map_blocks,
    scan_blocks,
    set_rows,
    slice_rows,
)
from headlab.ops.varying import sum_to_like, vary_like


class Spec(Protocol):
    """What makes logits out of states and rows; hashable, static under `jit`.

    States `h` are a pytree of arrays with a leading axis of tokens, `rows` one with a leading axis of vocabulary rows;
    all arrays of logits have the shape [rows, tokens], float32 at least.
    """

    @property
    def vocab_size(self) -> int:
        """Real rows; those after them are padding."""

    @property
    def token_block(self) -> int | None:
        """Tokens of a block; None: chosen by size."""

    @property
    def vocab_block(self) -> int | None:
        """Rows of a block; None: chosen by size."""

    def products(self, h: Any, rows: Any) -> Any:
        """What the logits and their gradient are made of: a pytree of [rows, tokens, ...] arrays."""

    def logits(self, z: Any) -> Array:
        """The logits [rows, tokens] of `products`."""

    def pull(self, h: Any, rows: Any, z: Any, dlogits: Array) -> tuple[Any, Any]:
        """(dh, drows), like h and rows but float32 at least, for a gradient in the logits."""


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
# With fewer tokens than this beside all rows, adding to the gradient of all rows costs more than a larger block does.
_FEWEST_TOKENS = {"cpu": 256, "gpu": 1024, "tpu": 512}
# The largest block with all rows; with more rows, a fourth multiply costs less.
_LARGEST_BLOCK_BYTES = {"cpu": 32 << 20, "gpu": 512 << 20, "tpu": 256 << 20}
# Gradients made in the forward pass are held once more than the caller's; larger ones are made in the backward pass.
_LARGEST_HELD = 128 << 20


def setting(table: dict[str, int]) -> int:
    """The entry for the device that JAX computes on."""
    return table.get(jax.default_backend(), table["gpu"])


def _count(tree: Any) -> int:
    return jax.tree.leaves(tree)[0].shape[0]


def block_sizes(tokens: int, rows: int, spec: Spec) -> tuple[int, int]:
    """(token_block, vocab_block): the given ones, or such that a block of logits has about the size of a cache.

    All rows are one block where that leaves room for enough tokens, else blocks of 1,024 rows.
    """
    budget, fewest = setting(_BLOCK_BYTES) // 4, setting(_FEWEST_TOKENS)
    most = setting(_LARGEST_BLOCK_BYTES) // 4 // fewest
    vocab_block = spec.vocab_block or (rows if rows <= most else 1024)
    vocab_block = max(1, min(vocab_block, rows))
    fitting = max(budget // vocab_block, fewest)
    # Blocks of equal size, so that no small remainder pays for a whole loop body.
    fitting = math.ceil(tokens / math.ceil(max(tokens, 1) / fitting))
    return max(1, min(spec.token_block or fitting, tokens)), vocab_block


def made_in_forward(rows: Any, tokens: int, spec: Spec) -> bool:
    """Whether `softmax_loss` makes gradients beside the loss: all rows are one block, and their gradient is small."""
    _, vocab_block = block_sizes(tokens, _count(rows), spec)
    size = sum(math.prod(a.shape) for a in jax.tree.leaves(rows))
    return vocab_block >= _count(rows) and 4 * size <= _LARGEST_HELD


# --- numbers a token ---------------------------------------------------------------------------------------------


def softmax_statistics(h: Any, rows: Any, targets: Int[Array, "tokens"], spec: Spec) -> Statistics:
    """nll, the log-partition and uniform_nll of every token, in blocks; differentiable in h and rows.

    With t the logits over the real rows: lse = log Σ exp t = max + log_sum, nll = log_sum − (t_target − max). Peak
    memory beyond inputs and gradients is a block of logits and one of each gradient. Reverse-mode derivatives of any
    order work; forward-mode ones are refused by JAX with a TypeError.
    """
    return _statistics(h, rows, targets, spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _statistics(h, rows, targets, spec):
    token_block, _ = block_sizes(_count(h), _count(rows), spec)

    def one(h, targets):
        return finish(walk_rows(h, rows, targets, spec, token_block), targets, spec)

    return map_blocks(one, token_block, h, targets)


def _statistics_forward(h, rows, targets, spec):
    out = _statistics(h, rows, targets, spec)
    return out, (h, rows, targets, out.max, out.log_sum)


def _statistics_backward(spec, residuals, cotangent: Statistics):
    h, rows, targets, maximum, log_sum = residuals
    g = cotangent._replace(nll=_or_nan(cotangent.nll, targets, spec))
    stats = Statistics(g.nll, maximum, log_sum, g.uniform_nll)
    gradients = _gradients if all(_wide(a) for a in jax.tree.leaves(rows)) else _first_order
    dh, drows = gradients(h, rows, targets, stats, g, spec)
    return _summed(dh, h), _summed(drows, rows), None


_statistics.defvjp(_statistics_forward, _statistics_backward)


def _gradients(h, rows, targets, stats: Statistics, g: Statistics, spec: Spec):
    """(dh, drows) of the statistics in the dtypes of h and rows, every block of logits made again.

    The vocabulary is outermost: the gradient of a row is finished and rounded before the next rows begin.
    """
    token_block, vocab_block = block_sizes(_count(h), _count(rows), spec)
    tokens = (h, targets, stats, g)

    def rows_step(carry, start, size):
        dh, drows = carry
        block = rows_of_block(rows, start, size)

        def tokens_step(carry, token_start, token_size):
            dh, dblock = carry
            part, own_targets, own_stats, own_g = slice_rows(tokens, token_start, token_size)
            z = spec.products(part, block)
            dlogits = dlogits_of(spec.logits(z), start, own_targets, own_stats, own_g, spec)
            more_h, more = spec.pull(part, block, z, dlogits)
            return add_rows(dh, more_h, token_start), jax.tree.map(jnp.add, dblock, more)

        zeros = _zeros(block, h, rows, g.nll)
        dh, dblock = fold_slices(tokens_step, token_block, _count(h), (dh, zeros))
        return dh, set_rows(drows, as_bits(_rounded(dblock, rows)), start)

    empty = jax.tree.map(
        lambda a: vary_like(jnp.zeros_like(a), *jax.tree.leaves((h, rows, g.nll))), as_bits(rows)
    )
    dh, drows = fold_slices(
        rows_step, vocab_block, _count(rows), (_zeros(h, h, rows, g.nll), empty)
    )
    return _rounded(dh, h), from_bits(drows, rows)


# --- sums for training -------------------------------------------------------------------------------------------


def softmax_loss(
    h: Any,
    rows: Any,
    targets: Int[Array, "tokens"],
    where: Bool[Array, "tokens"],
    spec: Spec,
    *,
    z_loss_weight: float = 0.0,
    label_smoothing: float = 0.0,
) -> Sums:
    """Sums over the counted tokens of the training objective and of the pure cross-entropy, in nats.

    objective = Σ (1−α)·nll + α·uniform_nll + z_loss_weight·lse², so that with smoothing α the target gets
    1 − α + α/V and every other real token α/V. Only `objective` is differentiable; `nats` and `weight` are constants.
    A token with `where` False contributes exactly zero to value and gradient, whatever its state or id. Reverse-mode
    derivatives of any order work; forward-mode ones are refused by JAX with a TypeError.
    """
    h = jax.tree.map(lambda a: jnp.where(_beside(where, a), a, 0), h)
    targets = jnp.where(where, targets, 0)
    if made_in_forward(rows, _count(h), spec):
        objective, nats = _loss(h, rows, targets, where, spec, z_loss_weight, label_smoothing)
    else:
        stats = _statistics(h, rows, targets, spec)
        per_token = _objective(stats, where, z_loss_weight, label_smoothing)
        objective, nats = jax.tree.map(jnp.sum, per_token)
    count = jnp.sum(where, dtype=objective.dtype)
    return Sums(objective, jax.lax.stop_gradient(nats), count)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _loss(h, rows, targets, where, spec, z_loss_weight, label_smoothing):
    stats = _statistics(h, rows, targets, spec)
    per_token = _objective(stats, where, z_loss_weight, label_smoothing)
    return jax.tree.map(jnp.sum, per_token)


def _objective(stats: Statistics, where, z_loss_weight: float, label_smoothing: float):
    """(objective, nll) a token, zero where not counted."""
    objective = stats.nll
    if label_smoothing:
        objective = (1 - label_smoothing) * stats.nll + label_smoothing * stats.uniform_nll
    if z_loss_weight:
        objective = objective + z_loss_weight * (stats.max + stats.log_sum) ** 2
    return jnp.where(where, objective, 0), jnp.where(where, stats.nll, 0)


def _loss_forward(h, rows, targets, where, spec, z_loss_weight, label_smoothing):
    token_block, _ = block_sizes(_count(h), _count(rows), spec)

    def one(drows, h, targets, where):
        z = spec.products(h, rows)
        logits = spec.logits(z)
        stats = finish(_advance(_start(h, rows), logits, 0, targets, spec), targets, spec)
        objective, nats = _objective(stats, where, z_loss_weight, label_smoothing)
        counted = where.astype(logits.dtype)
        g = Statistics(
            nll=_or_nan(counted * (1 - label_smoothing), targets, spec),
            max=jnp.zeros_like(counted),
            log_sum=counted * 2 * z_loss_weight * (stats.max + stats.log_sum),
            uniform_nll=counted * label_smoothing,
        )
        dh, more = spec.pull(h, rows, z, dlogits_of(logits, 0, targets, stats, g, spec))
        return jax.tree.map(jnp.add, drows, more), (dh, objective, nats)

    zeros = _zeros(rows, h, rows, where)
    drows, (dh, objective, nats) = scan_blocks(one, token_block, zeros, h, targets, where)
    return (jnp.sum(objective), jnp.sum(nats)), (dh, drows, h, rows)


def _loss_backward(spec, z_loss_weight, label_smoothing, residuals, cotangent):
    dh, drows, h, rows = residuals
    g, _ = cotangent  # the pure nats are reported, never differentiated
    dh, drows = jax.tree.map(lambda d: g * d, (dh, drows))
    dh, drows = _rounded(dh, h), _rounded(drows, rows)
    return _summed(dh, h), _summed(drows, rows), None, None


_loss.defvjp(_loss_forward, _loss_backward)


# --- one block ---------------------------------------------------------------------------------------------------


def walk_rows(h, rows, targets, spec: Spec, token_block: int) -> _Running:
    """The running statistics of a block of tokens after all blocks of the vocabulary."""
    total = _count(rows)
    _, vocab_block = block_sizes(token_block, total, spec)

    def step(running, start, size):
        block = rows_of_block(rows, start, size)
        return _advance(running, spec.logits(spec.products(h, block)), start, targets, spec)

    return fold_slices(step, vocab_block, total, _start(h, rows))


def _start(h, rows) -> _Running:
    first = jax.tree.leaves(h)[0]
    zero = jnp.zeros(first.shape[0], accumulator(first.dtype))
    like = jax.tree.leaves((h, rows))
    return _Running(*(vary_like(x, *like) for x in (zero - jnp.inf, zero, zero, zero)))


def _advance(running: _Running, logits, start, targets, spec: Spec) -> _Running:
    """Takes the logits of rows from `start` on into the running statistics; padded rows count for nothing."""
    size = logits.shape[0]
    ids = start + jnp.arange(size, dtype=jnp.int32)[:, None]
    real = ids < spec.vocab_size
    shown = jnp.where(real, logits, -jnp.inf)
    new_max = jnp.maximum(running.max, jnp.max(shown, axis=0))
    # A block (or all so far) may hold padding only: its maximum is −inf, and 0 is subtracted in its place.
    old, new = _finite(running.max), _finite(new_max)
    seen = jnp.minimum(start, spec.vocab_size).astype(logits.dtype)
    return _Running(
        new_max,
        # exp(−inf − new) = 0 where nothing was seen; exp(0 − new) would overflow when all logits are very negative.
        running.sum_exp * jnp.exp(running.max - new) + jnp.sum(jnp.exp(shown - new), axis=0),
        running.target + jnp.sum(jnp.where(ids == targets, logits, 0), axis=0),
        running.centred + seen * (old - new) + jnp.sum(jnp.where(real, logits - new, 0), axis=0),
    )


def _finite(x: Array) -> Array:
    return jnp.where(jnp.isneginf(x), 0, x)


def finish(running: _Running, targets, spec: Spec) -> Statistics:
    """The statistics of tokens whose rows have all been seen."""
    shift = _finite(running.max)
    log_sum = jnp.log(running.sum_exp)
    nll = jnp.where(_known(targets, spec), log_sum - (running.target - shift), jnp.nan)
    return Statistics(nll, shift, log_sum, log_sum - running.centred / spec.vocab_size)


def dlogits_of(logits, start, targets, stats: Statistics, g: Statistics, spec: Spec):
    """The gradient in the logits of the statistics weighted by the cotangents `g`.

    (g_nll + g_log_sum + g_uniform)·p_v − g_nll·[v = target] − g_uniform/V, zero in padded rows.
    """
    ids = start + jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    share = g.nll + g.log_sum + g.uniform_nll
    dlogits = share * jnp.exp((logits - stats.max) - stats.log_sum)
    dlogits = dlogits - jnp.where(ids == targets, g.nll, 0)
    dlogits = dlogits - g.uniform_nll / spec.vocab_size
    return jnp.where(ids < spec.vocab_size, dlogits, 0)


def _known(targets, spec: Spec):
    return (targets >= 0) & (targets < spec.vocab_size)


def _or_nan(g, targets, spec: Spec):
    """A cotangent of nll, NaN where nll is NaN for its target and somebody counts it."""
    return jnp.where(_known(targets, spec) | (g == 0), g, jnp.nan)


def rows_of_block(rows: Any, start, size: int) -> Any:
    """Rows start … start+size−1, tied to `start`: else XLA on CPU converts all of bfloat16 rows before a loop."""
    if isinstance(start, jax.Array):
        rows, start = jax.lax.optimization_barrier((rows, start))
    return slice_rows(rows, start, size)


def _zeros(tree: Any, *like: Any) -> Any:
    leaves = jax.tree.leaves(like)
    return jax.tree.map(
        lambda a: vary_like(jnp.zeros(a.shape, accumulator(a.dtype)), *leaves), tree
    )


def _rounded(gradients: Any, primals: Any) -> Any:
    return jax.tree.map(lambda d, p: d.astype(p.dtype), gradients, primals)


def _summed(gradients: Any, primals: Any) -> Any:
    """Gradients summed over the mesh axes that their primals do not vary over."""
    return jax.tree.map(sum_to_like, gradients, primals)


def _wide(array: Array) -> bool:
    return array.dtype.itemsize > 2


@functools.partial(jax.custom_jvp, nondiff_argnums=(5,))
def _first_order(h, rows, targets, stats, g, spec):
    """`_gradients` of rows in two bytes a number, which it writes as bits: no derivative passes through those."""
    return _gradients(h, rows, targets, stats, g, spec)


@_first_order.defjvp
def _refuse_second_order(spec, primals, tangents):
    raise TypeError(
        f"second derivatives of the loss are not made for weights in {jax.tree.leaves(primals[1])[0].dtype}; "
        "give them in float32"
    )


def _beside(mask, array):
    return mask.reshape(mask.shape + (1,) * (array.ndim - 1))
