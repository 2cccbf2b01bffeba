"""A linear softmax whose matrix is a product of two narrow ones, weight = A·B."""

from typing import Literal

import jax
from flax import nnx

from headlab.costs import HeadCost, Mode, passes
from headlab.embeddings import Embedding, Factorised, init_rows
from headlab.heads.linear import LinearHead, linear_reason
from headlab.ops import linear
from headlab.ops.shards import UNMARKED, all_rows_shape


class LowRank(LinearHead):
    """logits = map((h·Bᵀ) · Aᵀ + bias), A `[padded_vocab_size, rank]` and Bᵀ the kernel `[d_model, rank]`.

    With `tied`, A is the table of a factorised input embedding (Lan et al. 2020, ALBERT), whose own projection
    back to d_model stays apart from B.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        d_model: int,
        rngs: nnx.Rngs,
        vocab_multiple: int = 1,
        init_scale: float = 0.25,
        rank: int | None = None,
        tied: bool = False,
        bias: bool = False,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        logits_dtype: Literal["float32", "bfloat16"] = "float32",
    ):
        """
        Args:
            rank: width r of the two factors, in 1 … d_model; None is half of d_model, at least 1.
            tied: take A from the model's factorised embedding, of the same rank.
            the rest: see `LinearHead`. Rows of A start normal with standard deviation `init_scale / √rank`, B with
                1/√d_model, so that logits start with standard deviation `init_scale`.

        Raises:
            ValueError: naming the value and the range.
        """
        super().__init__(
            vocab_size=vocab_size,
            d_model=d_model,
            vocab_multiple=vocab_multiple,
            bias=bias,
            softcap=softcap,
            logit_scale=logit_scale,
            logits_dtype=logits_dtype,
        )
        self.rank = _rank(rank, d_model)
        self.kernel = nnx.Param(
            jax.random.normal(rngs.params(), (d_model, self.rank)) / d_model**0.5
        )
        if tied:
            self.ties_to = "factors"
        self.weight = (
            None
            if tied
            else nnx.Param(init_rows(rngs.params(), vocab_size, self.rows, self.rank, init_scale))
        )

    @classmethod
    def input_embedding(
        cls,
        *,
        vocab_size,
        d_model,
        rngs,
        vocab_multiple=1,
        init_scale=0.25,
        token_counts=None,
        **options,
    ) -> Embedding:
        """A factorised embedding of the head's rank where the two are tied, else a plain table."""
        common = dict(rngs=rngs, vocab_multiple=vocab_multiple, init_scale=init_scale)
        if options.get("tied"):
            return Factorised(vocab_size, d_model, _rank(options.get("rank"), d_model), **common)
        return super().input_embedding(vocab_size=vocab_size, d_model=d_model, **common)

    def _weight(self, embedding) -> jax.Array:
        if self.weight is not None:
            return self.weight[...]
        if not isinstance(embedding, Factorised):
            raise ValueError(
                "a tied low-rank head needs the model's factorised input embedding: pass embedding=, a "
                f"headlab.embeddings.Factorised of rank {self.rank}, not {type(embedding).__name__}"
            )
        weight = embedding.weight[...]
        shape = all_rows_shape(weight)
        if shape != (self.rows, self.rank) or embedding.vocab_size != self.vocab_size:
            raise ValueError(
                f"the embedding's table is {shape} of {embedding.vocab_size} tokens; this tied head of "
                f"{self.vocab_size} tokens needs {(self.rows, self.rank)}{UNMARKED}"
            )
        return weight

    def _context(self, h):
        return linear(h, self.kernel[...])

    def rank_bound(self) -> int | None:
        """rank + 1, with a bias rank + 2 (Yang et al. 2018); None with a soft cap, which is not linear."""
        if self.spec.logit_map.softcap is not None:
            return None
        return min(self.vocab_size, self.rank + 1 + (self.bias is not None))

    def rank_reason(self) -> str:
        return linear_reason(self.spec, f"rank = {self.rank}", biased=self.bias is not None)

    def _own_matrix(self) -> int:
        return 0 if self.weight is None else self.vocab_size * self.rank

    def cost(self, mode: Mode, token_counts=None) -> HeadCost:
        factors = self.vocab_size * self.rank + self.d_model * self.rank
        bias = self.vocab_size if self.bias is not None else 0
        own = self._own_matrix() + self.d_model * self.rank + bias
        flops = 2.0 * passes(mode) * factors
        return HeadCost(own, flops, 4.0 * (factors + bias))


def _rank(rank: int | None, d_model: int) -> int:
    if rank is None:
        return max(d_model // 2, 1)
    if not 1 <= rank <= d_model:
        raise ValueError(f"rank is {rank}; it must be in 1 … {d_model}, the width of the model")
    return rank
