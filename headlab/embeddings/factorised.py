"""An input embedding of low rank: the product of a narrow table and a projection."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from headlab.embeddings.base import Embedding
from headlab.embeddings.table import init_rows, known_rows, padded_size
from headlab.ops import linear


class Factorised(Embedding):
    """`table[id] · kernel`: `[padded_vocab_size, rank]` times `[rank, d_model]` (Lan et al. 2020, ALBERT).

    Entries start with standard deviation `init_scale / √d_model`, as those of a plain `Table`.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        rank: int,
        *,
        rngs: nnx.Rngs,
        vocab_multiple: int = 1,
        init_scale: float = 0.25,
    ):
        if not 1 <= rank <= d_model:
            raise ValueError(f"rank is {rank}; it must be in 1 … {d_model}, the width of the model")
        self.vocab_size, self.d_model, self.rank = vocab_size, d_model, rank
        rows = padded_size(vocab_size, vocab_multiple)
        self.weight = nnx.Param(init_rows(rngs.params(), vocab_size, rows, rank, init_scale))
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (rank, d_model)) / d_model**0.5)

    def __call__(self, ids: Int[Array, "..."], dtype=jnp.float32) -> Float[Array, "... d_model"]:
        """The embeddings of `ids` in `dtype`; an id outside [0, vocab_size) gives NaN, never another token's row."""
        rows = known_rows(self.weight[...], ids, self.vocab_size, dtype)
        return linear(rows, self.kernel[...])

    def parameter_count(self) -> int:
        """Parameters without padding."""
        return (self.vocab_size + self.d_model) * self.rank
