"""What is read off any head's blocks of log-probabilities: the normaliser, then a fold over all blocks.

`head` is a `headlab.heads.Head`, whose contract is all that is used; `[tokens, V]` is never built.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from headlab.ops import best_of_shards, empty_top_k, merge_top_k
from headlab.ops.shards import sum_shards
from headlab.ops.token_report import TokenReport, comes_before, rank_of


def folded_top_k(
    head: Any, h: Float[Array, "tokens d_model"], k: int, embedding: Any
) -> tuple[Float[Array, "tokens k"], Int[Array, "tokens k"]]:
    """(log-probabilities, ids) of the k most probable tokens, descending; equal ones by ascending id."""
    norm = head.normalise(h, embedding)
    start = empty_top_k((h.shape[0],), k, jnp.promote_types(h.dtype, jnp.float32))

    def merge(best, block, ids):
        return merge_top_k(best[0], best[1], block, ids) if k else best

    values, ids = head._fold(h, norm, embedding, start, merge)
    return best_of_shards(values, ids, *head._sharded(embedding))


def folded_entropy(
    head: Any, h: Float[Array, "tokens d_model"], embedding: Any
) -> Float[Array, "tokens"]:
    """−Σ p·log p in nats."""
    norm = head.normalise(h, embedding)
    zero = jnp.zeros(h.shape[0], jnp.promote_types(h.dtype, jnp.float32))
    return head._total(h, norm, embedding, zero, lambda total, block, ids: total + surprise(block))


def folded_report(
    head: Any,
    h: Float[Array, "tokens d_model"],
    ids: Int[Array, "tokens"],
    k: int,
    embedding: Any,
) -> TokenReport:
    """`Head.token_report` of k ≥ 1, in one fold."""
    norm = head.normalise(h, embedding)
    own = head.log_prob_at(h, norm, ids, embedding)

    def add(carry, block, block_ids):
        values, found, entropy, before = carry
        more = comes_before(block, block_ids, own[:, None], ids[:, None])
        return (
            *merge_top_k(values, found, block, block_ids),
            entropy + surprise(block),
            before + jnp.sum(more, axis=1, dtype=jnp.int32),
        )

    best = empty_top_k(ids.shape, k, own.dtype)
    start = (*best, jnp.zeros(ids.shape, own.dtype), jnp.zeros(ids.shape, jnp.int32))
    values, found, *sums = head._fold(h, norm, embedding, start, add)
    sharded = head._sharded(embedding)
    values, found = best_of_shards(values, found, *sharded)
    entropy, before = sum_shards(sums, *sharded)
    rank = jnp.where(jnp.isnan(own), 0, rank_of(ids, found, before))
    return TokenReport(own, rank, values, found, entropy, head._log_partition(norm))


def surprise(block: Float[Array, "tokens size"]) -> Float[Array, "tokens"]:
    """−Σ p·log p over a block of log-probabilities; a probability of 0 adds 0."""
    finite = jnp.where(jnp.isneginf(block), 0, block)
    return -jnp.sum(jnp.exp(block) * finite, axis=1)
