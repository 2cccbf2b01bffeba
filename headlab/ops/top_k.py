"""The most probable tokens, found block by block; equal values are ordered by the lower token id."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from headlab.ops.cross_entropy import check_linear, linear_spec
from headlab.ops.linear_logits import accumulator
from headlab.ops.shards import first_row, gather_shards
from headlab.ops.softmax_blocks import block_sizes, softmax_statistics
from headlab.ops.token_blocks import fold_slices, map_blocks, slice_rows
from headlab.ops.varying import vary_like


def top_k(
    h: Float[Array, "*batch d_model"],
    weight: Float[Array, "rows d_model"],
    k: int,
    *,
    bias: Float[Array, "rows"] | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"]]:
    """(log-probabilities in nats, ids) of the k most probable tokens of softmax(map(h · weightᵀ + bias)), descending.

    Equal ones are ordered by ascending id. Options as in `linear_cross_entropy`; rows from `vocab_size` on never
    appear. `[..., V]` is never held. Rows sharded over a mesh axis "vocab": as in `linear_cross_entropy`.

    Raises:
        ValueError: k outside 0 … vocab_size, shapes that do not fit, or an option outside its range. TypeError: a dtype
            that does not fit.

    >>> weight = jnp.log(jnp.array([[1.0], [6.0], [3.0]]))
    >>> log_probs, ids = top_k(jnp.ones((1, 1)), weight, k=2)
    >>> ids.tolist(), [f"{p:.2f}" for p in jnp.exp(log_probs[0])]
    ([[1, 2]], ['0.60', '0.30'])
    """
    check_linear(h, weight, bias)
    spec = linear_spec(weight, softcap, logit_scale, vocab_size)
    if not 0 <= k <= spec.vocab_size:
        raise ValueError(f"k is {k}; it must be in 0 … {spec.vocab_size}, the number of tokens")
    flat, rows = h.reshape(-1, h.shape[-1]), (weight, bias)
    first = first_row(weight)
    token_block, vocab_block = block_sizes(flat.shape[0], weight.shape[0], spec)

    def one(h):
        stats = softmax_statistics(h, rows, jnp.zeros(h.shape[0], jnp.int32), spec)

        def step(best, start, size):
            block = slice_rows(rows, start, size)
            logits = spec.logits(spec.products(h, block)).T
            ids = first + start + jnp.arange(size, dtype=jnp.int32)
            shown = jnp.where(ids < spec.vocab_size, logits, -jnp.inf)
            values, found = best
            return merge_top_k(values, found, shown, ids)

        best = empty_top_k(h.shape[:1], k, accumulator(h.dtype))
        best = jax.tree.map(lambda x: vary_like(x, h, *jax.tree.leaves(rows)), best)
        best = fold_slices(step, vocab_block, weight.shape[0], best) if k else best
        logits, ids = best_of_shards(*best, weight)
        return (logits - stats.max[:, None]) - stats.log_sum[:, None], ids

    values, ids = map_blocks(one, token_block, flat)
    return values.reshape(*h.shape[:-1], k), ids.reshape(*h.shape[:-1], k)


def empty_top_k(shape: tuple[int, ...], k: int, dtype) -> tuple[Array, Array]:
    """k candidates that lose against every real one: value −inf, id 2³¹ − 1."""
    return (
        jnp.full((*shape, k), -jnp.inf, dtype),
        jnp.full((*shape, k), jnp.iinfo(jnp.int32).max, jnp.int32),
    )


def merge_top_k(
    values: Float[Array, "... k"],
    ids: Int[Array, "... k"],
    block_values: Float[Array, "... n"],
    block_ids: Int[Array, "... n"],
) -> tuple[Float[Array, "... k"], Int[Array, "... k"]]:
    """The k best of k candidates and a block, by descending value, then ascending id.

    `block_ids` must ascend along the last axis (every segment of a head promises it): within a block
    `jax.lax.top_k` then breaks ties by id, and one small two-key sort orders the survivors.
    """
    k = values.shape[-1]
    best, place = jax.lax.top_k(block_values, min(k, block_values.shape[-1]))
    best_ids = jnp.take_along_axis(jnp.broadcast_to(block_ids, block_values.shape), place, axis=-1)
    joined = jnp.concatenate([values, best], axis=-1)
    joined_ids = jnp.concatenate([ids, best_ids], axis=-1)
    return first_k(joined, joined_ids, k)


def best_of_shards(
    values: Float[Array, "... k"], ids: Int[Array, "... k"], *rows: Array
) -> tuple[Float[Array, "... k"], Int[Array, "... k"]]:
    """The k best of the candidates of all shards, equal on all; by descending value, then ascending id."""
    k = values.shape[-1]
    values, ids = gather_shards((values, ids), *rows)
    joined, joined_ids = (jnp.concatenate(list(a), axis=-1) for a in (values, ids))
    return first_k(joined, joined_ids, k)


def first_k(
    values: Float[Array, "... n"], ids: Int[Array, "... n"], k: int
) -> tuple[Float[Array, "... k"], Int[Array, "... k"]]:
    """The k best of candidates in any order, by descending value, then ascending id."""
    negative, ids = jax.lax.sort((-values, ids), num_keys=2, dimension=-1)
    return -negative[..., :k], ids[..., :k]
