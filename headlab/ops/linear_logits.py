"""The logits of a linear softmax: a product, a bias, and an elementwise map; a block of them and its gradient."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class LogitMap(NamedTuple):
    """Elementwise map from a raw product z = h·wᵀ + b to a logit t.

    s = scale·z, with a soft cap c: s = c·tanh(scale·z / c). t = s, or with `sigsoftmax` (Kanai et al. 2018)
    t = s + log σ(s), so that exp t = exp(s)·σ(s).
    """

    scale: float = 1.0
    softcap: float | None = None
    sigsoftmax: bool = False

    def __call__(self, z: Array) -> Array:
        s = self._capped(z)
        return s + jax.nn.log_sigmoid(s) if self.sigsoftmax else s

    def derivative(self, z: Array) -> Array | float:
        """dt/dz = scale · (1 − tanh²(scale·z / c)) · (1 + σ(−s)), the last factor with `sigsoftmax` alone."""
        if self.softcap is None and not self.sigsoftmax:
            return self.scale
        s = self._capped(z)
        slope = self.scale if self.softcap is None else self.scale * (1 - (s / self.softcap) ** 2)
        return slope * (1 + jax.nn.sigmoid(-s)) if self.sigsoftmax else slope

    def _capped(self, z: Array) -> Array:
        s = z * self.scale
        return s if self.softcap is None else self.softcap * jnp.tanh(s / self.softcap)


class LinearSpec(NamedTuple):
    """What a linear softmax needs beside its arrays; static under `jit`."""

    vocab_size: int  # real tokens; rows of the weight beyond it are padding
    logit_map: LogitMap = LogitMap()
    logits_dtype: str = "float32"  # the dtype that products are rounded to before the map
    token_block: int | None = None  # None: chosen by size
    vocab_block: int | None = None
    sum_blocks: int | None = None  # K; see `headlab.ops.softmax_tree`

    def products(self, h: Array, rows: tuple[Array, Array | None]) -> Array:
        """z = weight·hᵀ + bias, [rows, tokens]; operands in the dtype of `h`, accumulated in float32 at least."""
        weight, bias = rows
        wide = accumulator(h.dtype)
        rounded = wide if h.dtype == jnp.float64 else self.logits_dtype
        z = jax.lax.dot_general(
            weight.astype(h.dtype), h, (((1,), (1,)), ((), ())), preferred_element_type=rounded
        ).astype(wide)
        return z if bias is None else z + bias.astype(wide)[:, None]

    def logits(self, z: Array) -> Array:
        """t = map(z), [rows, tokens]."""
        return self.logit_map(z)

    def pull(
        self, h: Array, rows: tuple[Array, Array | None], z: Array, dlogits: Array
    ) -> tuple[Array, tuple[Array, Array | None]]:
        """(dh, (dweight, dbias)) for the gradient in the logits, [rows, tokens]; float32 at least."""
        weight, bias = rows
        dz = dlogits * self.logit_map.derivative(z)
        narrow = dz.astype(h.dtype)
        wide = accumulator(h.dtype)
        # Both products contract the last axis of one operand with the first of the other: XLA on CPU is half as fast
        # at any other, and without the barrier it would turn the transpose below into one.
        turned = jax.lax.dot_general(
            weight.astype(h.dtype).T, narrow, (((1,), (0,)), ((), ())), preferred_element_type=wide
        )
        dh = jax.lax.optimization_barrier(turned).T
        dweight = jax.lax.dot_general(
            narrow, h, (((1,), (0,)), ((), ())), preferred_element_type=wide
        )
        return dh, (dweight, None if bias is None else jnp.sum(dz, axis=1))


def accumulator(dtype) -> jnp.dtype:
    """The dtype of sums: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def block_logits(
    h: Float[Array, "tokens d_model"],
    rows: Float[Array, "rows d_model"],
    bias: Float[Array, "rows"] | None,
    spec: LinearSpec,
) -> Float[Array, "tokens rows"]:
    """map(h · rowsᵀ + bias), float32 at least; products are rounded to `logits_dtype` first."""
    return spec.logits(spec.products(h, (rows, bias))).T
