"""What every input embedding is, and arrays of a module that are not trained."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int


class Constant(nnx.Variable):
    """An array that no gradient reaches and that a checkpoint holds beside the parameters: a permutation, for one."""


class Embedding(nnx.Module):
    """Token ids to vectors; the model owns it, and a tied head is handed it."""

    vocab_size: int
    d_model: int

    def __call__(self, ids: Int[Array, "..."], dtype=jnp.float32) -> Float[Array, "... d_model"]:
        """The vectors of `ids` in `dtype`; an id outside [0, vocab_size) gives NaN, never another token's vector."""
        raise NotImplementedError

    def parameter_count(self) -> int:
        """Parameters without padding."""
        raise NotImplementedError
