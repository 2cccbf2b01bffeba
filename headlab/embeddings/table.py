"""A plain embedding table, `[padded_vocab_size, d_model]`, a row a token."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from headlab.embeddings.base import Embedding
from headlab.ops.shards import is_sharded, sum_shards, take_rows


def padded_size(vocab_size: int, multiple: int) -> int:
    """The least multiple of `multiple` that holds `vocab_size` rows; both at least 1, else ValueError.

    >>> padded_size(8192, 128), padded_size(50257, 128)
    (8192, 50304)
    """
    for name, value in (("vocab_size", vocab_size), ("vocab_multiple", multiple)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    return -(-vocab_size // multiple) * multiple


def init_rows(
    key: Array, vocab_size: int, rows: int, d_model: int, init_scale: float
) -> Float[Array, "rows d_model"]:
    """Normal rows with standard deviation `init_scale / √d_model`; the padding rows are zero.

    The real rows are drawn alone, so that padding does not change them. Against a normalised hidden state (norm √d)
    a logit then has standard deviation `init_scale` at any width. ValueError where `d_model` is below 1,
    or `init_scale` negative or not finite.
    """
    if d_model < 1:
        raise ValueError(f"d_model is {d_model}; it must be at least 1")
    if not 0 <= init_scale < float("inf"):
        raise ValueError(f"init_scale is {init_scale}; it must be 0 or more, and finite")
    real = jax.random.normal(key, (vocab_size, d_model)) * (init_scale / d_model**0.5)
    return jnp.pad(real, ((0, rows - vocab_size), (0, 0)))


def known_rows(
    weight: Float[Array, "rows d"], ids: Int[Array, "..."], vocab_size: int, dtype
) -> Float[Array, "... d"]:
    """weight[ids] in `dtype`; NaN where an id is outside [0, vocab_size). Each shard looks up its own rows."""
    known = (ids >= 0) & (ids < vocab_size)
    safe = jnp.where(known, ids, 0)
    if is_sharded(weight):
        own, _ = take_rows(weight, safe)
        rows = sum_shards(own.astype(dtype), weight)
    else:
        rows = jnp.take(weight, safe, axis=0).astype(dtype)
    return jnp.where(known[..., None], rows, jnp.nan)


class Table(Embedding):
    """The input embedding; the model owns it, and a tied head is handed it."""

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        *,
        rngs: nnx.Rngs,
        vocab_multiple: int = 1,
        init_scale: float = 0.25,
    ):
        self.vocab_size = vocab_size
        self.d_model = d_model
        rows = padded_size(vocab_size, vocab_multiple)
        self.weight = nnx.Param(init_rows(rngs.params(), vocab_size, rows, d_model, init_scale))

    def __call__(self, ids: Int[Array, "..."], dtype=jnp.float32) -> Float[Array, "... d_model"]:
        """Rows of `ids` in `dtype`; an id outside [0, vocab_size) gives a row of NaN, never another token's row."""
        return known_rows(self.weight[...], ids, self.vocab_size, dtype)

    def parameter_count(self) -> int:
        """Parameters without padding."""
        return self.vocab_size * self.d_model
