"""All that is asked of a given token's softmax at once, in one pass over the vocabulary: what scoring needs.

The token's log-probability and rank, the most probable tokens, the entropy and the log-partition; `[tokens, V]` is
never held.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from headlab.ops.linear_logits import accumulator
from headlab.ops.running import (
    Running,
    Spec,
    advance,
    finish,
    finite,
    join_shards,
    known,
    real_rows,
    start,
)
from headlab.ops.shards import first_row, sum_shards
from headlab.ops.softmax_blocks import block_sizes
from headlab.ops.token_blocks import fold_slices, map_blocks, rows_of_block
from headlab.ops.top_k import best_of_shards, empty_top_k, merge_top_k
from headlab.ops.varying import vary_like


class TokenReport(NamedTuple):
    """What a distribution says of one given token a position; float32 at least, in nats."""

    log_prob: Array  # [tokens]; NaN where the id is outside [0, vocab_size)
    rank: Array  # [tokens], int32: 1 + the number of tokens before it; 0 where the id is outside
    top_log_probs: Array  # [tokens, k], descending; equal ones by ascending id
    top_ids: Array  # [tokens, k], int32
    entropy: Array  # [tokens], −Σ p·log p
    lse: Array | None  # [tokens], the log-partition; None where the distribution is not one softmax


class _Seen(NamedTuple):
    """What is known of a block of tokens after some rows."""

    running: Running
    weighted: Array  # Σ exp(t − max)·(t − max), [tokens]
    before: Array  # how many tokens come before the given one, [tokens]
    values: Array  # the largest logits, [tokens, k]
    ids: Array


def softmax_report(
    h: Any,
    rows: Any,
    targets: Int[Array, "tokens"],
    own: Float[Array, "tokens"],
    k: int,
    spec: Spec,
) -> TokenReport:
    """The report of `targets`, whose logits `own` are, with the k ≥ 1 most probable tokens.

    With the running maximum m, s = Σ exp(t − m) and e = Σ exp(t − m)·(t − m): entropy = log s − e/s. Peak memory is a
    block of logits. Rows sharded over the vocabulary, inside `jax.shard_map`: the results are those of all rows, equal
    on all shards.
    """
    leaves = jax.tree.leaves(rows)
    total, first = leaves[0].shape[0], first_row(*leaves)
    token_block, vocab_block = block_sizes(targets.shape[0], total, spec)
    like = jax.tree.leaves((h, rows))

    def one(h, targets, own):
        def step(seen, place, size):
            block = rows_of_block(rows, place, size)
            logits = spec.logits(spec.products(h, block))
            return _advanced(seen, logits, first, place, total, targets, own, spec)

        best = empty_top_k(targets.shape, k, accumulator(own.dtype))
        zero = jnp.zeros(targets.shape, accumulator(own.dtype))
        marked = (vary_like(a, *like) for a in (zero, jnp.zeros(targets.shape, jnp.int32), *best))
        return fold_slices(step, vocab_block, total, _Seen(start(h, rows), *marked))

    seen = _joined(map_blocks(one, token_block, h, targets, own), first, total, leaves, spec)
    stats = finish(seen.running, targets, spec)
    top = (seen.values - stats.max[:, None]) - stats.log_sum[:, None]
    entropy = stats.log_sum - seen.weighted / seen.running.sum_exp
    rank = jnp.where(known(targets, spec), rank_of(targets, seen.ids, seen.before), 0)
    return TokenReport(-stats.nll, rank, top, seen.ids, entropy, stats.max + stats.log_sum)


def comes_before(
    values: Float[Array, "..."], ids: Int[Array, "..."], own: Any, targets: Any
) -> Bool[Array, "..."]:
    """Whether a token precedes the target: it is more probable, or as probable and of a lower id."""
    return (ids != targets) & ((values > own) | ((values == own) & (ids < targets)))


def rank_of(
    targets: Int[Array, "tokens"], top_ids: Int[Array, "tokens k"], before: Int[Array, "tokens"]
) -> Int[Array, "tokens"]:
    """The place among the top, counted from 1, where the target is there; else 1 + before, at least k + 1.

    The value that others are compared with comes from another product than theirs and may be rounded otherwise; with
    the top, the rank always agrees.
    """
    found = top_ids == targets[:, None]
    listed = jnp.argmax(found, axis=1).astype(jnp.int32) + 1
    return jnp.where(
        found.any(axis=1), listed, jnp.maximum(before + 1, top_ids.shape[1] + 1)
    ).astype(jnp.int32)


def _advanced(seen: _Seen, logits, first, place, total, targets, own, spec: Spec) -> _Seen:
    """Takes the logits [rows, tokens] of the rows from `place` of this shard on into what is seen."""
    ids = first + place + jnp.arange(logits.shape[0], dtype=jnp.int32)
    so_far = jnp.minimum(place, real_rows(first, total, spec))
    running = advance(seen.running, logits, so_far, first + place, targets, spec)
    shown = jnp.where((ids < spec.vocab_size)[:, None], logits, -jnp.inf)
    centred = shown - finite(running.max)
    more = jnp.sum(jnp.exp(centred) * finite(centred), axis=0)
    before = comes_before(shown, ids[:, None], own, targets)
    return _Seen(
        running,
        _shifted(seen.weighted, seen.running, running.max) + more,
        seen.before + jnp.sum(before, axis=0, dtype=jnp.int32),
        *merge_top_k(seen.values, seen.ids, shown.T, ids),
    )


def _shifted(weighted: Array, running: Running, largest: Array) -> Array:
    """Σ exp(t − m)·(t − m) for a larger m: the old one's sums, moved and scaled."""
    moved = finite(running.max) - finite(largest)
    return (weighted + moved * running.sum_exp) * jnp.exp(running.max - finite(largest))


def _joined(seen: _Seen, first, total: int, leaves, spec: Spec) -> _Seen:
    """What is known of the rows of all shards, equal on all."""
    running = join_shards(seen.running, real_rows(first, total, spec), *leaves)
    own = (_shifted(seen.weighted, seen.running, running.max), seen.before)
    weighted, before = sum_shards(own, *leaves)
    values, ids = best_of_shards(seen.values, seen.ids, *leaves)
    return _Seen(running, weighted, before, values, ids)
