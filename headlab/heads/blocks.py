"""What heads make their blocks of log-probabilities with: a shard's rows cut out, numbered by token, and summed."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from headlab.ops.shards import first_row

#: the id of a padding row: no token's
NO_TOKEN = 2**31 - 1


def cut_rows(rows: Any, start: Any, size: int) -> Any:
    """Rows `start … start+size−1` of every array of this shard, as arrays of their own.

    What is computed of them is compiled without regard to what they were cut from: the same bits for a block of rows,
    however many others its shard has.
    """
    cut = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, size), rows)
    return jax.lax.optimization_barrier(cut)


def numbered(
    log_probs: Float[Array, "tokens size"], start: Any, real: int, rows: Array, ids_of: Any = None
) -> tuple[Float[Array, "tokens size"], Int[Array, "size"]]:
    """(log_probs, token ids) of the rows from number `start` of this shard on, `rows` being all of the shard's.

    ids_of(numbers in the segment) gives the ids, by default the numbers. Rows that are not among the segment's `real`
    ones have the log-probability −inf and the id `NO_TOKEN`.
    """
    size = log_probs.shape[1]
    number = first_row(rows) + start + jnp.arange(size, dtype=jnp.int32)
    ids = number if ids_of is None else ids_of(jnp.minimum(number, real - 1))
    mine = number < real
    return jnp.where(mine, log_probs, -jnp.inf), jnp.where(mine, ids, NO_TOKEN)


def add_real(total: Array, block: Float[Array, "tokens size"], ids: Int[Array, "size"]) -> Array:
    """`total` and the sum of the log-probabilities of the real tokens of a block."""
    return total + jnp.sum(jnp.where(ids == NO_TOKEN, 0, block), axis=1)
