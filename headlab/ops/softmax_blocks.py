"""One blockwise softmax statistic under all heads; `[tokens, V]` is never held.

It walks over blocks of tokens and of vocabulary rows. What a logit is, a `Spec` says: a product of states and rows for
linear heads, a few products mixed for others. Two faces of one computation:

* `softmax_statistics` gives numbers a token (nll, lse, …), differentiable in each by making the blocks again, with the
  vocabulary outermost: no more is held than a block of logits, whatever the sizes;
* `softmax_loss` gives the sums that training needs. Where all rows are few enough for one block, it makes the gradients
  beside them (three matrix multiplies in place of four), with the tokens outermost.

Inside a `jax.shard_map` with rows sharded over the mesh axis `vocab` and `check_vma=True`, the results are those of all
rows, equal on all shards: a few numbers a token and dh cross the axis. `spec.sum_blocks` makes their bits independent
of the number of shards; see `headlab.ops.softmax_tree`.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from headlab.ops.linear_logits import accumulator
from headlab.ops.running import (
    Running,
    Spec,
    Statistics,
    advance,
    dlogits_of,
    finish,
    join_shards,
    or_nan,
    real_rows,
    start,
)
from headlab.ops.shards import first_row, shard_count
from headlab.ops.softmax_tree import tree_gradients, tree_statistics
from headlab.ops.token_blocks import (
    add_rows,
    as_bits,
    fold_slices,
    from_bits,
    map_blocks,
    rows_of_block,
    scan_blocks,
    set_rows,
    slice_rows,
)
from headlab.ops.varying import narrow_like, vary_like


class Sums(NamedTuple):
    """Scalars over the counted tokens, float32 at least."""

    objective: Array  # Σ (1−α)·nll + α·uniform_nll + z·lse²; the only differentiable one
    nats: Array  # Σ nll
    weight: Array  # number of counted tokens


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


def block_sizes(tokens: int, rows: int, spec: Spec, width: int = 0) -> tuple[int, int]:
    """(token_block, vocab_block): the given ones, or such that a block of logits has about the size of a cache.

    All rows are one block where that leaves room for enough tokens, and where their gradient, of `width` numbers a row,
    is small enough to be held; else blocks of 1,024 rows.
    """
    budget, fewest = setting(_BLOCK_BYTES) // 4, setting(_FEWEST_TOKENS)
    most = setting(_LARGEST_BLOCK_BYTES) // 4 // fewest
    together = rows <= most and 4 * rows * width <= _LARGEST_HELD
    vocab_block = spec.vocab_block or (rows if together else 1024)
    vocab_block = max(1, min(vocab_block, rows))
    fitting = max(budget // vocab_block, fewest)
    # Blocks of equal size, so that no small remainder pays for a whole loop body.
    fitting = math.ceil(tokens / math.ceil(max(tokens, 1) / fitting))
    return max(1, min(spec.token_block or fitting, tokens)), vocab_block


def _width(rows: Any) -> int:
    """Numbers a row."""
    return sum(math.prod(a.shape[1:]) for a in jax.tree.leaves(rows))


def made_in_forward(rows: Any, tokens: int, spec: Spec) -> bool:
    """Whether `softmax_loss` makes gradients beside the loss: all rows are one block, and their gradient is small.

    With an order of sums, the rows of all shards are looked at: the answer must not depend on their number.
    """
    leaves = jax.tree.leaves(rows)
    shards = shard_count(*leaves) if spec.sum_blocks else 1
    count = _count(rows) * shards
    _, vocab_block = block_sizes(tokens, count, spec, _width(rows))
    return vocab_block >= count and 4 * count * _width(rows) <= _LARGEST_HELD


def _tree_tokens(tokens: int, rows: Any, spec: Spec) -> int:
    """Tokens of a block in an order of sums, whatever the number of shards."""
    count = _count(rows) * shard_count(*jax.tree.leaves(rows))
    if not made_in_forward(rows, tokens, spec):
        count = count // (spec.sum_blocks or 1)
    return block_sizes(tokens, count, spec, _width(rows))[0]


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
    if spec.sum_blocks:

        def one(h, targets):
            return tree_statistics(h, rows, targets, spec)[0]

        return map_blocks(one, _tree_tokens(_count(h), rows, spec), h, targets)
    token_block, _ = block_sizes(_count(h), _count(rows), spec, _width(rows))

    def local(h, targets):
        return walk_rows(h, rows, targets, spec, token_block)

    running = map_blocks(local, token_block, h, targets)
    return finish(_joined(running, rows, spec), targets, spec)


def _statistics_forward(h, rows, targets, spec):
    out = _statistics(h, rows, targets, spec)
    return out, (h, rows, targets, out.max, out.log_sum)


def _statistics_backward(spec, residuals, cotangent: Statistics):
    h, rows, targets, maximum, log_sum = residuals
    g = cotangent._replace(nll=or_nan(cotangent.nll, targets, spec))
    stats = Statistics(g.nll, maximum, log_sum, g.uniform_nll)
    if spec.sum_blocks:
        dh, drows = _tree_gradients(h, rows, targets, stats, g, spec)
    else:
        gradients = _gradients if all(_wide(a) for a in jax.tree.leaves(rows)) else _first_order
        dh, drows = gradients(h, rows, targets, stats, g, spec)
    return narrow_like(dh, h), narrow_like(drows, rows), None


_statistics.defvjp(_statistics_forward, _statistics_backward)


def _gradients(h, rows, targets, stats: Statistics, g: Statistics, spec: Spec):
    """(dh of this shard, float32 at least, and drows in the dtype of rows), every block of logits made again.

    The vocabulary is outermost: the gradient of a row is finished and rounded before the next rows begin.
    """
    token_block, vocab_block = block_sizes(_count(h), _count(rows), spec, _width(rows))
    tokens = (h, targets, stats, g)
    first = first_row(*jax.tree.leaves(rows))

    def rows_step(carry, place, size):
        dh, drows = carry
        block = rows_of_block(rows, place, size)

        def tokens_step(carry, token_start, token_size):
            dh, dblock = carry
            part, own_targets, own_stats, own_g = slice_rows(tokens, token_start, token_size)
            z = spec.products(part, block)
            dlogits = dlogits_of(spec.logits(z), first + place, own_targets, own_stats, own_g, spec)
            more_h, more = spec.pull(part, block, z, dlogits)
            return add_rows(dh, more_h, token_start), jax.tree.map(jnp.add, dblock, more)

        zeros = _zeros(block, h, rows, g.nll)
        dh, dblock = fold_slices(tokens_step, token_block, _count(h), (dh, zeros))
        rounded = jax.tree.map(lambda d, p: d.astype(p.dtype), dblock, rows)
        return dh, set_rows(drows, as_bits(rounded), place)

    empty = jax.tree.map(
        lambda a: vary_like(jnp.zeros_like(a), *jax.tree.leaves((h, rows, g.nll))), as_bits(rows)
    )
    dh, drows = fold_slices(
        rows_step, vocab_block, _count(rows), (_zeros(h, h, rows, g.nll), empty)
    )
    return dh, from_bits(drows, rows)


def _tree_gradients(h, rows, targets, stats: Statistics, g: Statistics, spec: Spec):
    """(dh, equal on all shards, and drows), float32 at least, in the order of `spec.sum_blocks`."""

    def one(drows, h, targets, stats, g):
        dh, drows = tree_gradients(h, rows, targets, stats, g, spec, drows)
        return drows, dh

    token_block = _tree_tokens(_count(h), rows, spec)
    drows, dh = scan_blocks(one, token_block, _zeros(rows, h, rows, g.nll), h, targets, stats, g)
    return dh, drows


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
    def one(drows, h, targets, where):
        if spec.sum_blocks:
            stats, z = tree_statistics(h, rows, targets, spec, keep=True)
        else:
            running, z = _all_rows(h, rows, targets, spec)
            stats = finish(running, targets, spec)
        objective, nats = _objective(stats, where, z_loss_weight, label_smoothing)
        counted = where.astype(stats.nll.dtype)
        g = Statistics(
            nll=or_nan(counted * (1 - label_smoothing), targets, spec),
            max=jnp.zeros_like(counted),
            log_sum=counted * 2 * z_loss_weight * (stats.max + stats.log_sum),
            uniform_nll=counted * label_smoothing,
        )
        if spec.sum_blocks:
            dh, drows = tree_gradients(h, rows, targets, stats, g, spec, drows, z)
        else:
            first = first_row(*jax.tree.leaves(rows))
            dlogits = dlogits_of(spec.logits(z), first, targets, stats, g, spec)
            dh, more = spec.pull(h, rows, z, dlogits)
            drows = jax.tree.map(jnp.add, drows, more)
        return drows, (dh, objective, nats)

    if spec.sum_blocks:
        token_block = _tree_tokens(_count(h), rows, spec)
    else:
        token_block, _ = block_sizes(_count(h), _count(rows), spec, _width(rows))
    zeros = _zeros(rows, h, rows, where)
    drows, (dh, objective, nats) = scan_blocks(one, token_block, zeros, h, targets, where)
    return (jnp.sum(objective), jnp.sum(nats)), (dh, drows, h, rows)


def _all_rows(h, rows, targets, spec: Spec) -> tuple[Running, Any]:
    """(the statistics of the rows of all shards, the products of this shard's), all rows one block."""
    z = spec.products(h, rows)
    first = first_row(*jax.tree.leaves(rows))
    running = advance(start(h, rows), spec.logits(z), 0, first, targets, spec)
    return _joined(running, rows, spec), z


def _joined(running: Running, rows: Any, spec: Spec) -> Running:
    """The statistics of the rows of all shards."""
    leaves = jax.tree.leaves(rows)
    count = real_rows(first_row(*leaves), _count(rows), spec)
    return join_shards(running, count, *leaves)


def _loss_backward(spec, z_loss_weight, label_smoothing, residuals, cotangent):
    dh, drows, h, rows = residuals
    g, _ = cotangent  # the pure nats are reported, never differentiated
    dh, drows = jax.tree.map(lambda d: g * d, (dh, drows))
    return narrow_like(dh, h), narrow_like(drows, rows), None, None


_loss.defvjp(_loss_forward, _loss_backward)


# --- one block of tokens -----------------------------------------------------------------------------------------


def walk_rows(h, rows, targets, spec: Spec, token_block: int) -> Running:
    """The running statistics of a block of tokens after all blocks of this shard's rows."""
    total = _count(rows)
    _, vocab_block = block_sizes(token_block, total, spec, _width(rows))
    first = first_row(*jax.tree.leaves(rows))

    def step(running, place, size):
        block = rows_of_block(rows, place, size)
        seen = jnp.minimum(place, real_rows(first, total, spec))
        logits = spec.logits(spec.products(h, block))
        return advance(running, logits, seen, first + place, targets, spec)

    return fold_slices(step, vocab_block, total, start(h, rows))


def _zeros(tree: Any, *like: Any) -> Any:
    leaves = jax.tree.leaves(like)
    return jax.tree.map(
        lambda a: vary_like(jnp.zeros(a.shape, accumulator(a.dtype)), *leaves), tree
    )


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
