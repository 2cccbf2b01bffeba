"""Top-k candidates that are merged block by block; equal values are ordered by the lower token id."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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
    negative, joined_ids = jax.lax.sort((-joined, joined_ids), num_keys=2, dimension=-1)
    return -negative[..., :k], joined_ids[..., :k]
