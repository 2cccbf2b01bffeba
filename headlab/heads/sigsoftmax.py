"""Sigsoftmax: a softmax whose exponential is multiplied by a sigmoid (Kanai et al. 2018).

p(v) = exp(z_v)·σ(z_v) / Σ_u exp(z_u)·σ(z_u), which is a softmax of t = z + log σ(z). The map from z to t is not
linear, so that the rank of log P isn't bounded by the width of h.
"""

from typing import ClassVar, Literal

from flax import nnx

from headlab.costs import HeadCost, Mode
from headlab.heads.output_matrix import OutputMatrix


class SigSoftmax(OutputMatrix):
    """A linear head with z = map(h · weightᵀ + bias) put through sigsoftmax; smoothing and z-loss use the logits t."""

    sigsoftmax: ClassVar[bool] = True

    def __init__(
        self,
        *,
        vocab_size: int,
        d_model: int,
        rngs: nnx.Rngs,
        vocab_multiple: int = 1,
        init_scale: float = 0.25,
        tied: bool = False,
        bias: bool = False,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        logits_dtype: Literal["float32", "bfloat16"] = "float32",
    ):
        """`tied` takes the model's input embedding for the matrix; for the rest see `LinearHead`.

        Own rows start normal with standard deviation `init_scale / √d_model`.
        """
        super().__init__(
            vocab_size=vocab_size,
            d_model=d_model,
            rngs=rngs,
            vocab_multiple=vocab_multiple,
            init_scale=init_scale,
            d_latent=None,
            tied=tied,
            bias=bias,
            softcap=softcap,
            logit_scale=logit_scale,
            logits_dtype=logits_dtype,
        )

    def cost(self, mode: Mode, token_counts=None) -> HeadCost:
        """That of a linear head: one matrix multiply forward."""
        return self._cost(mode, products=1)
