"""`Head.token_report` in an order of sums that the number of shards doesn't change.

The rows of each segment are cut into K blocks, as `headlab.ops.softmax_tree` cuts them, and each piece of a block gives
its candidates for the top, its count of tokens before the given one and its part of the entropy, compiled by itself.
Counts and the top are exact however they are joined; parts of the entropy are added along the balanced tree.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from headlab.heads.folded import surprise
from headlab.ops import best_of_shards, empty_top_k, merge_top_k, vary_like
from headlab.ops.shards import isolated, shard_count, sum_pairs, sum_shards
from headlab.ops.softmax_tree import fold_pieces, piece_of, put_block, sum_parts
from headlab.ops.token_report import TokenReport, comes_before, rank_of
from headlab.ops.top_k import first_k


def ordered_report(
    head: Any,
    h: Float[Array, "tokens d_model"],
    ids: Int[Array, "tokens"],
    k: int,
    embedding: Any,
) -> TokenReport:
    """The report of k ≥ 1 for a head with an order of sums.

    Three passes over the vocabulary: the normaliser, the nll, and the blocks of log-probabilities.
    """
    norm, own = head.normalise(h, embedding), -head._nll(h, ids, embedding)
    sharded = head._sharded(embedding)
    best = empty_top_k(ids.shape, k, own.dtype)
    before, entropy = jnp.zeros(ids.shape, jnp.int32), jnp.zeros(ids.shape, own.dtype)
    for segment in head.segments():
        size = segment.rows // head.sum_blocks
        own_blocks = head.sum_blocks // shard_count(*sharded)
        piece = piece_of(size, head._block_rows(h.shape[0], segment))

        def found(start, h, norm, ids, own, rows, segment=segment, piece=piece):
            del (
                rows
            )  # the head has them; here they say that what is found of them differs between shards
            block, block_ids = head.log_prob_block(h, norm, segment, start, piece, embedding)
            more = comes_before(block, block_ids, own[:, None], ids[:, None])
            return (
                merge_top_k(*empty_top_k(ids.shape, k, own.dtype), block, block_ids),
                jnp.sum(more, axis=1, dtype=jnp.int32),
                surprise(block),
            )

        def step(carry, place, _, size=size, found=found):
            best, before, parts = carry
            candidates, more, part = isolated(found, place, h, norm, ids, own, sharded)
            index = place // size
            values, top = (jnp.concatenate(a, axis=1) for a in zip(best, candidates, strict=True))
            return (
                first_k(values, top, k),
                before + more,
                put_block(parts, parts[index] + part, index),
            )

        parts = jnp.zeros((own_blocks, *ids.shape), own.dtype)
        like = (h, ids, *jax.tree.leaves(norm), *sharded)
        start = jax.tree.map(lambda a, like=like: vary_like(a, *like), (best, before, parts))
        best, before, parts = fold_pieces(step, piece, own_blocks * size // piece, start)
        entropy = entropy + sum_parts(sum_pairs(parts), sharded)
    values, top = best_of_shards(*best, *sharded)
    rank = jnp.where(jnp.isnan(own), 0, rank_of(ids, top, sum_shards(before, *sharded)))
    return TokenReport(own, rank, values, top, entropy, head._log_partition(norm))
