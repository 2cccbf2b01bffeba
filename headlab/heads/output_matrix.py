"""A linear softmax over contexts of any width, its matrix the head's own or the model's table.

What sigsoftmax, the mixtures and mixtape have in common: they differ in how contexts and logits are made of h and of
products with rows, not in where the rows live.
"""

from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from headlab.costs import HeadCost, Mode, passes
from headlab.embeddings import init_rows
from headlab.heads.linear import LinearHead, linear_reason, tied_weight
from headlab.ops import linear


def latent_width(d_latent: int | None, d_model: int, *, tied: bool) -> int:
    """The width of contexts, None standing for d_model; ValueError below 1, or tied and not as wide as the table."""
    width = d_model if d_latent is None else d_latent
    if width < 1:
        raise ValueError(f"d_latent is {d_latent}; it must be at least 1, or None for d_model")
    if tied and width != d_model:
        raise ValueError(
            f"d_latent is {d_latent} and d_model {d_model}; contexts of a tied head must be as wide as "
            "the table's rows: leave d_latent at None, or set tied=False"
        )
    return width


def matrix_cost(mode: Mode, *, own: int, read: int, multiplied: int) -> HeadCost:
    """A head with `own` parameters that reads `read` and multiplies each token's states with `multiplied`, in float32.

    Forward 2 · multiplied operations a token, in training three times that.
    """
    return HeadCost(own, 2.0 * passes(mode) * multiplied, 4.0 * read)


class Projection(nnx.Module):
    """A kernel `[d_in, d_out]` that starts normal with standard deviation 1/√d_in, and a bias that starts at zero.

    A normalised state (norm √d_in) then gives products of standard deviation 1 at any width.
    """

    def __init__(self, d_in: int, d_out: int, *, rngs: nnx.Rngs, bias: bool = False):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (d_in, d_out)) / d_in**0.5)
        self.bias = nnx.Param(jnp.zeros(d_out)) if bias else None

    def wide(self, x: Float[Array, "tokens d_in"]) -> Float[Array, "tokens d_out"]:
        """x · kernel, float32 at least, for priors: rounded to bfloat16 they would round the loss."""
        return linear(x.astype(jnp.promote_types(x.dtype, jnp.float32)), self.kernel[...])

    def contexts(
        self, x: Float[Array, "tokens d_in"], width: int
    ) -> Float[Array, "tokens n width"]:
        """tanh(x · kernel + bias) in pieces of `width`, in the dtype of x."""
        y = linear(x, self.kernel[...]).astype(jnp.promote_types(x.dtype, jnp.float32))
        if self.bias is not None:
            y = y + self.bias[...]
        return jnp.tanh(y).astype(x.dtype).reshape(x.shape[0], y.shape[1] // width, width)


class OutputMatrix(LinearHead):
    """A linear head over contexts `[tokens, d_latent]`; tied, its matrix is the table that the model passes in."""

    #: whether the map of logits ends in sigsoftmax
    sigsoftmax: ClassVar[bool] = False

    def __init__(
        self,
        *,
        vocab_size: int,
        d_model: int,
        rngs: nnx.Rngs,
        vocab_multiple: int,
        init_scale: float,
        d_latent: int | None,
        tied: bool,
        bias: bool,
        softcap: float | None,
        logit_scale: float,
        logits_dtype: Literal["float32", "bfloat16"],
    ):
        """
        Args:
            d_latent: width of the contexts, ≥ 1; None is d_model.
            tied: take the model's table `[padded vocab_size, d_model]` for the matrix; needs d_latent = d_model. Else
                rows start normal with standard deviation `init_scale / √d_latent`.
            the rest: see `LinearHead`.

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
        if self.sigsoftmax:
            logit_map = self.spec.logit_map._replace(sigsoftmax=True)
            self.spec = self.spec._replace(logit_map=logit_map)
        self.d_latent = latent_width(d_latent, d_model, tied=tied)
        if tied:
            self.ties_to = "table"
            self.weight = None
        else:
            rows = init_rows(rngs.params(), vocab_size, self.rows, self.d_latent, init_scale)
            self.weight = nnx.Param(rows)

    def _weight(self, embedding) -> jax.Array:
        if self.weight is not None:
            return self.weight[...]
        return tied_weight(embedding, (self.rows, self.d_latent), self.vocab_size)

    def rank_bound(self) -> int | None:
        """d_latent + 1, with a bias d_latent + 2; None with a soft cap or sigsoftmax, which are not linear."""
        if self.spec.logit_map.softcap is not None or self.sigsoftmax:
            return None
        return min(self.vocab_size, self.d_latent + 1 + (self.bias is not None))

    def rank_reason(self) -> str:
        return linear_reason(self.spec, f"d_latent = {self.d_latent}", biased=self.bias is not None)

    def _own_matrix(self) -> int:
        return 0 if self.weight is None else self.vocab_size * self.d_latent

    def _cost(self, mode: Mode, *, products: int, kernels: int = 0, biases: int = 0) -> HeadCost:
        """The cost of `products` contexts a token, made by so many parameters in kernels and biases."""
        matrix = self.vocab_size * self.d_latent
        beside = kernels + biases + (self.vocab_size if self.bias is not None else 0)
        return matrix_cost(
            mode,
            own=self._own_matrix() + beside,
            read=matrix + beside,
            multiplied=products * matrix + kernels,
        )
