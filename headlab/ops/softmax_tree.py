"""The blockwise softmax in an order of sums that the number of shards doesn't change.

The padded rows of all shards are cut into K blocks of equal size, K a power of two that the number of shards divides.
Each block gives its part of the statistics and of dh by kernels of the block's shape; parts are joined along one
balanced binary tree, whose lower levels lie inside a shard and whose upper ones across shards. One shard and many so
compute the same numbers in the same order. Tokens are outermost: what is held beside the gradients is made of the
blocks of a few tokens. A large block is walked in pieces, one after another.

What is promised: the same bits of loss, nll and their gradients on any number of shards that divides K, for one loss in
a program, on CPU devices of one machine, compiled with XLA's usual optimisations. Checked on 1, 2, 4 and 8 shards, for
every head. Where a program adds two such losses, XLA has been seen to round the sum of their gradients otherwise.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from headlab.ops import running as run
from headlab.ops.running import Running, Spec, Statistics
from headlab.ops.shards import (
    first_row,
    fold_pairs,
    gather_shards,
    isolated,
    shard_count,
    sum_pairs,
)
from headlab.ops.token_blocks import add_rows, fold_slices, rows_of_block
from headlab.ops.varying import vary_like

# Rows of one multiply: more add nothing to its speed, and a block of a large vocabulary would be held whole.
_LARGEST_PIECE = 1024


def blocks_of_shard(rows: Any, sum_blocks: int) -> tuple[int, int]:
    """(blocks of this shard, rows of a block); ValueError where K = `sum_blocks` does not cut the rows evenly."""
    leaves = jax.tree.leaves(rows)
    shards, length = shard_count(*leaves), leaves[0].shape[0]
    if sum_blocks < 1 or sum_blocks & (sum_blocks - 1):
        raise ValueError(f"sum_blocks is {sum_blocks}; it must be a power of two: 1, 2, 4, …")
    if sum_blocks % shards:
        raise ValueError(
            f"sum_blocks is {sum_blocks} and there are {shards} shards of the vocabulary; the shards must divide it"
        )
    if shards * length % sum_blocks:
        raise ValueError(
            f"sum_blocks is {sum_blocks}; it must divide the {shards * length} padded rows of the vocabulary: make "
            f"vocab_multiple a multiple of {sum_blocks}"
        )
    own = sum_blocks // shards
    return own, length // own


def tree_statistics(
    h: Any, rows: Any, targets: Array, spec: Spec, *, keep: bool = False
) -> tuple[Statistics, Any]:
    """(the statistics of all rows of all shards, and with `keep` the products of this shard's, [blocks, rows, …])."""
    parts, products = tree_parts(h, rows, targets, spec, keep=keep)
    _, size = _blocks(rows, spec)

    def finish(running, targets):
        return run.finish(running, targets, spec)

    joined = join_parts(parts, lambda k: run.real_rows(k * size, size, spec), rows, finish, targets)
    return joined, products


def tree_parts(
    h: Any, rows: Any, targets: Array, spec: Spec, *, keep: bool = False
) -> tuple[Running, Any]:
    """(the statistics of each block of this shard, all [blocks, tokens], and with `keep` the blocks' products)."""
    own, size = _blocks(rows, spec)
    piece = size if keep else piece_of(size)
    first, like = first_row(*jax.tree.leaves(rows)), jax.tree.leaves((h, rows))

    def found(running, block, states, begin, seen, ids):
        z = spec.products(states, block)
        if running is None:
            running = run.start(states, block)
        running = run.advance(running, spec.logits(z), seen, begin, ids, spec)
        return running, z if keep else None

    def one(running, place):
        """The statistics of a block after one more piece of its rows, and the products."""
        begin = jnp.asarray(first + place, jnp.int32)
        if piece == size:  # all of it; what it starts from is no operand, which XLA could look into
            return isolated(found, None, rows_of_block(rows, place, size), h, begin, 0, targets)
        start_of_block = begin - place % size
        seen = jnp.minimum(place % size, run.real_rows(start_of_block, size, spec))
        block = rows_of_block(rows, place, piece)
        return isolated(found, running, block, h, begin, seen, targets)

    empty = run.start(h, rows)
    shapes = jax.eval_shape(lambda: one(empty, jnp.int32(0))[1])
    products = jax.tree.map(lambda s: vary_like(jnp.zeros((own, *s.shape), s.dtype), *like), shapes)
    blank = jax.tree.map(lambda a: jnp.broadcast_to(a, (own, *a.shape)), empty)

    def step(held, place, _):
        running, products = held
        index = place // size
        before = jax.tree.map(lambda a: a[index], running)
        after, made = one(before, place)
        return put_block(running, after, index), put_block(products, made, index)

    return fold_pieces(step, piece, own * size // piece, (blank, products))


def join_parts(
    parts: Running,
    count: Callable[[int], int],
    rows: Any,
    finish: Callable[..., Any],
    *arguments: Any,
) -> Any:
    """finish(the statistics of all blocks of all shards, *arguments), joined along the tree.

    Block k has `count(k)` real rows.
    """
    gathered = gather_shards(jnp.stack(parts, axis=1), *jax.tree.leaves(rows))

    def join(a, b):
        (left, n), (right, m) = a, b
        return run.join(left, right, n, m), n + m

    def joined(blocks, *arguments):
        counted = [(Running(*blocks[k]), count(k)) for k in range(blocks.shape[0])]
        return finish(fold_pairs(join, counted)[0], *arguments)

    return isolated(joined, gathered.reshape(-1, *gathered.shape[2:]), *arguments)


def tree_gradients(
    h: Any,
    rows: Any,
    targets: Array,
    stats: Statistics,
    g: Statistics,
    spec: Spec,
    drows: Any,
    products: Any = None,
) -> tuple[Any, Any]:
    """(dh, equal on all shards; `drows` with the gradient in this shard's rows added), float32 at least.

    `products` are what `tree_statistics` kept, or None: made again.
    """
    dh, drows = shard_gradients(h, rows, targets, stats, g, spec, drows, products)
    return sum_parts(dh, rows), drows


def sum_parts(x: Any, rows: Any) -> Any:
    """Σ over the shards along the tree, equal on all."""
    leaves = jax.tree.leaves(rows)
    return jax.tree.map(lambda a: sum_pairs(gather_shards(a, *leaves)), x)


def shard_gradients(h, rows, targets, stats, g, spec: Spec, drows, products=None):
    """What `tree_gradients` gives, dh of this shard's rows alone."""
    own, size = _blocks(rows, spec)
    piece = size if products is not None else piece_of(size)
    first, like = first_row(*jax.tree.leaves(rows)), jax.tree.leaves((h, rows, g.nll))
    held = jax.tree.map(
        lambda a: vary_like(
            jnp.zeros((own, *a.shape), jnp.promote_types(a.dtype, jnp.float32)), *like
        ),
        h,
    )

    def found(block, states, begin, ids, stats, g, z):
        z = spec.products(states, block) if products is None else z
        dlogits = run.dlogits_of(spec.logits(z), begin, ids, stats, g, spec)
        return spec.pull(states, block, z, dlogits)

    def step(carry, place, _):
        dhs, drows = carry
        index = place // size
        z = None if products is None else jax.tree.map(lambda a: a[index], products)
        block = rows_of_block(rows, place, piece)
        begin = jnp.asarray(first + place, jnp.int32)
        more_h, more = isolated(found, block, h, begin, targets, stats, g, z)
        if piece < size:  # the pieces of a block, one after another
            before = jax.tree.map(lambda a: a[index], dhs)
            more_h = jax.tree.map(jnp.add, before, more_h)
        return put_block(dhs, more_h, index), add_rows(drows, more, place)

    dhs, drows = fold_pieces(step, piece, own * size // piece, (held, drows))
    return jax.tree.map(sum_pairs, dhs), drows


def sum_by_blocks(part: Callable[[Array], Array], rows: Array, sum_blocks: int) -> Array:
    """Σ part(block) over the K blocks of the rows of all shards, along the tree; equal on all shards."""
    own, size = blocks_of_shard(rows, sum_blocks)

    shape = jax.eval_shape(part, jax.ShapeDtypeStruct((size, *rows.shape[1:]), rows.dtype))
    held = vary_like(jnp.zeros((own, *shape.shape), shape.dtype), rows)

    def step(held, place, _):
        return put_block(held, isolated(part, rows_of_block(rows, place, size)), place // size)

    return sum_parts(sum_pairs(fold_pieces(step, size, own, held)), rows)


def _blocks(rows: Any, spec: Spec) -> tuple[int, int]:
    if spec.sum_blocks is None:
        raise ValueError("sum_blocks is None; an order of sums needs a number of blocks")
    return blocks_of_shard(rows, spec.sum_blocks)


def piece_of(size: int, largest: int = _LARGEST_PIECE) -> int:
    """Rows of a block that are taken at once: the block, halved while it is larger than needed and even."""
    while size > largest and size % 2 == 0:
        size //= 2
    return size


def fold_pieces(step: Any, size: int, count: int, carry: Any) -> Any:
    """carry = step(carry, place, size) for each of so many pieces of a shard, always in a loop.

    XLA would take a loop of one turn apart and lay out and fuse its body otherwise, which rounds otherwise: the length
    of such a loop is hidden from it.
    """
    if count > 1:
        return fold_slices(step, size, count * size, carry)
    turns = jax.lax.optimization_barrier(jnp.int32(count))
    return jax.lax.fori_loop(0, turns, lambda i, c: step(c, i * size, size), carry)


def put_block(held: Any, found: Any, index: Any) -> Any:
    """`held` with `found` at `index` of the leading axes."""

    def put(a, b):
        if a.shape[0] == 1:
            return b[None].astype(a.dtype)
        return jax.lax.dynamic_update_index_in_dim(a, b.astype(a.dtype), index, axis=0)

    return jax.tree.map(put, held, found)
