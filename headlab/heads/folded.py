"""The report of a given token from any head's blocks of log-probabilities: a fold after the normaliser."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from headlab.ops import best_of_shards, empty_top_k, merge_top_k
from headlab.ops.shards import sum_shards
from headlab.ops.token_report import TokenReport, comes_before, rank_of


def folded_report(
    head: Any,
    h: Float[Array, "tokens d_model"],
    ids: Int[Array, "tokens"],
    k: int,
    embedding: Any,
) -> TokenReport:
    """`Head.token_report` of k ≥ 1 by the contract's methods: the normaliser, then one walk over all blocks."""
    norm = head.normalise(h, embedding)
    own = head.log_prob_at(h, norm, ids, embedding)

    def add(carry, block, block_ids):
        values, found, entropy, before = carry
        finite = jnp.where(jnp.isneginf(block), 0, block)
        more = comes_before(block, block_ids, own[:, None], ids[:, None])
        return (
            *merge_top_k(values, found, block, block_ids),
            entropy - jnp.sum(jnp.exp(block) * finite, axis=1),
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
