"""Walking over blocks of the leading axis of arrays, with a smaller last block where it does not divide."""

import jax
import jax.numpy as jnp


def map_blocks(one, block: int, *arrays):
    """`one(*blocks)` on blocks of the leading axis of all `arrays`, results joined along theirs."""
    return scan_blocks(lambda carry, *a: (carry, one(*a)), block, (), *arrays)[1]


def scan_blocks(one, block: int, carry, *arrays):
    """`jax.lax.scan` of `one(carry, *blocks) -> (carry, results)` over blocks of the leading axis."""
    length = jax.tree.leaves(arrays)[0].shape[0]
    whole = length // block * block
    if length <= block:
        return one(carry, *arrays)
    blocks = jax.tree.map(lambda a: a[:whole].reshape(-1, block, *a.shape[1:]), arrays)
    carry, outs = jax.lax.scan(lambda c, a: one(c, *a), carry, blocks)
    outs = jax.tree.map(lambda a: a.reshape(whole, *a.shape[2:]), outs)
    if whole < length:
        carry, last = one(carry, *jax.tree.map(lambda a: a[whole:], arrays))
        outs = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), outs, last)
    return carry, outs


def fold_slices(one, block: int, length: int, carry):
    """carry = one(carry, start, size) for consecutive slices of 0 … length; `start` is traced, `size` static."""
    whole = length // block
    if whole == 1:
        carry = one(carry, 0, block)
    elif whole:
        starts = jnp.arange(whole, dtype=jnp.int32) * block
        carry, _ = jax.lax.scan(lambda c, s: (one(c, s, block), None), carry, starts)
    rest = length - whole * block
    return one(carry, whole * block, rest) if rest else carry


def slice_rows(tree, start, size: int):
    """Rows start … start+size−1 of every array; the array itself where these are all its rows."""
    return jax.tree.map(
        lambda a: a if size == a.shape[0] else jax.lax.dynamic_slice_in_dim(a, start, size), tree
    )


def add_rows(total, part, start):
    """`total` with `part` added to the rows from `start` on, array by array."""

    def add(total, part):
        if part.shape == total.shape:
            return total + part
        old = jax.lax.dynamic_slice_in_dim(total, start, part.shape[0])
        return jax.lax.dynamic_update_slice_in_dim(total, old + part, start, axis=0)

    return jax.tree.map(add, total, part)


def set_rows(total, part, start):
    """`total` with the rows from `start` on replaced by `part`, array by array."""

    def put(total, part):
        if part.shape == total.shape:
            return part
        return jax.lax.dynamic_update_slice_in_dim(total, part, start, axis=0)

    return jax.tree.map(put, total, part)


def as_bits(tree):
    """Arrays of two bytes a number as unsigned integers of the same bits, others as they are.

    XLA on CPU has no slices of such arrays to update: it would convert the whole array and back for every slice.
    """

    def bits(a):
        return jax.lax.bitcast_convert_type(a, jnp.uint16) if a.dtype.itemsize == 2 else a

    return jax.tree.map(bits, tree)


def from_bits(tree, like):
    """What `as_bits` made of arrays with the dtypes of `like`."""

    def numbers(a, like):
        return jax.lax.bitcast_convert_type(a, like.dtype) if a.dtype == jnp.uint16 else a

    return jax.tree.map(numbers, tree, like)


def rows_of_block(rows, start, size: int):
    """Rows start … start+size−1, tied to `start`: else XLA on CPU converts all of bfloat16 rows before a loop."""
    if isinstance(start, jax.Array):
        rows, start = jax.lax.optimization_barrier((rows, start))
    return slice_rows(rows, start, size)
