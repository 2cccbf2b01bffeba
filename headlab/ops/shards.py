"""Rows of a vocabulary that are sharded over the mesh axis `vocab`, seen from inside `jax.shard_map`.

Each shard holds a run of consecutive rows, all of one length: shard i has the rows from i·length on. Whether rows are
sharded their type says, which `shard_map` keeps with `check_vma=True`: they vary over the axis. Outside a `shard_map`
all rows are one shard.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from headlab.ops.varying import vary_like, varying_axes

#: the mesh axis over which rows of the vocabulary are sharded
VOCAB = "vocab"


#: what an error adds where rows may be a shard's that are not known to be
UNMARKED = (
    " (inside a shard_map, rows sharded over 'vocab' are known as such with check_vma=True alone)"
)


def is_sharded(*rows: Array) -> bool:
    """Whether any of the arrays is sharded over the vocabulary; a mesh with one shard counts."""
    return VOCAB in varying_axes(*rows)


def shard_count(*rows: Array) -> int:
    """The number of shards; 1 where nothing is sharded."""
    return jax.lax.axis_size(VOCAB) if is_sharded(*rows) else 1


def all_rows_shape(rows: Array) -> tuple[int, ...]:
    """The shape of rows, those of all shards together."""
    return (rows.shape[0] * shard_count(rows), *rows.shape[1:])


def first_row(*rows: Array) -> Any:
    """The number of this shard's first row; 0 where nothing is sharded."""
    return jax.lax.axis_index(VOCAB) * rows[0].shape[0] if is_sharded(*rows) else 0


def take_rows(rows: Any, ids: Array) -> tuple[Any, Array]:
    """(rows[ids] of this shard, whether they are its own); rows of others are 0. The ids count from row 0 of all."""
    leaves = jax.tree.leaves(rows)
    place = ids - first_row(*leaves)
    mine = (place >= 0) & (place < leaves[0].shape[0])
    place = jnp.where(mine, place, 0)

    def take(a):
        shown = mine.reshape(mine.shape + (1,) * (a.ndim - 1))
        return jnp.where(shown, jnp.take(a, place, axis=0), 0)

    return jax.tree.map(take, rows), mine


def sum_shards(x: Any, *rows: Array) -> Any:
    """Σ over the shards of every array of `x`, equal on all; the same arrays where `rows` are not sharded."""
    return jax.lax.psum(x, VOCAB) if is_sharded(*rows) else x


def gather_shards(x: Any, *rows: Array) -> Any:
    """Every array of `x` of all shards, equal on all, stacked along a new leading axis."""
    if not is_sharded(*rows):
        return jax.tree.map(lambda a: a[None], x)
    return jax.tree.map(lambda a: jax.lax.all_gather(a, VOCAB, to="invarying"), x)


def fold_pairs(join: Callable[[Any, Any], Any], parts: Sequence[Any]) -> Any:
    """`join` along a balanced binary tree over 2ⁿ parts: neighbours first, then neighbouring pairs, …"""
    parts = list(parts)
    if len(parts) & (len(parts) - 1):
        raise ValueError(f"{len(parts)} parts; a balanced binary tree needs a power of two")
    while len(parts) > 1:
        parts = [join(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def sum_pairs(stacked: Array) -> Array:
    """The sum over the leading axis, of 2ⁿ parts, by `fold_pairs`, rounded alike wherever it stands."""

    def total(stacked):
        return fold_pairs(operator.add, [stacked[i] for i in range(stacked.shape[0])])

    return isolated(total, stacked)


def isolated(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), arrays and pytrees of them, compiled as a computation of its own.

    XLA fuses, lays out and contracts what stands together; the same formula so is rounded otherwise in another
    surrounding. It optimises the branch of a conditional by itself, if it can't know that it is always taken.
    """
    args = jax.tree.map(jnp.asarray, args)
    always = jax.lax.optimization_barrier(jnp.bool_(True))
    leaves, shapes = jax.tree.leaves(args), jax.eval_shape(function, *args)

    def wanted(*args):
        return jax.tree.map(lambda a: vary_like(a, *leaves), function(*args))

    def never(*args):
        del args
        return jax.tree.map(lambda s: vary_like(jnp.zeros(s.shape, s.dtype), *leaves), shapes)

    return jax.lax.cond(always, wanted, never, *args)
