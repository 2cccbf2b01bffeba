"""The adaptive input embedding: rarer tokens have narrower rows (Baevski & Auli 2019, arXiv:1809.10853)."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from headlab.embeddings.base import Constant, Embedding
from headlab.embeddings.cutoffs import (
    Cutoffs,
    band_sizes,
    band_widths,
    resolve_cutoffs,
    token_order,
)
from headlab.embeddings.table import init_rows, padded_size
from headlab.ops import linear
from headlab.ops.shards import UNMARKED, all_rows_shape, sum_shards, take_rows


class TokenOrder(nnx.Module):
    """Which token stands at which place, and where each stands; cutoffs cut the places into bands."""

    def __init__(
        self, cutoffs: tuple[int, ...], vocab_size: int, token_counts: np.ndarray | None = None
    ):
        self.vocab_size = vocab_size
        self.cutoffs = cutoffs
        order = token_order(cutoffs, vocab_size, token_counts)
        self.token = Constant(jnp.asarray(order, jnp.int32))  # [V]: place → id
        self.place = Constant(jnp.asarray(np.argsort(order), jnp.int32))  # [V]: id → place

    def locate(self, ids: Int[Array, "..."]) -> tuple[Array, Array, Array]:
        """(known, band, row in the band) of each id, all [...]; an id outside [0, vocab_size) is not known."""
        known = (ids >= 0) & (ids < self.vocab_size)
        place = jnp.take(self.place[...], jnp.where(known, ids, 0), axis=0)
        edges = jnp.asarray((0, *self.cutoffs), jnp.int32)
        band = jnp.sum(place[..., None] >= edges[1:], axis=-1, dtype=jnp.int32)
        return known, band, place - edges[band]


class Band(nnx.Module):
    """The tokens of one band: rows `[padded size, width]` and, where `projected`, a kernel `[width, d_model]`."""

    def __init__(
        self,
        size: int,
        width: int,
        d_model: int,
        *,
        projected: bool,
        rngs: nnx.Rngs,
        vocab_multiple: int,
        init_scale: float,
    ):
        rows = padded_size(size, vocab_multiple)
        self.weight = nnx.Param(init_rows(rngs.params(), size, rows, width, init_scale))
        kernel = jax.random.normal(rngs.params(), (width, d_model)) if projected else None
        self.kernel = None if kernel is None else nnx.Param(kernel / d_model**0.5)


class Adaptive(Embedding):
    """An input embedding in bands: band i has rows of width `d_model // div_valueⁱ` and a projection to `d_model`.

    e(token) = weight_i[row] · kernel_i. The first band is as wide as the model and has no projection, which could add
    nothing to its rows: with no cutoffs this is a plain table, its rows in the order of the tokens' counts.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        *,
        rngs: nnx.Rngs,
        vocab_multiple: int = 1,
        init_scale: float = 0.25,
        cutoffs: Cutoffs = "auto",
        div_value: float = 4.0,
        projections: bool = True,
        token_counts: np.ndarray | None = None,
    ):
        """
        Args:
            vocab_size: real tokens. d_model: width of the result.
            vocab_multiple: the rows of each band are padded to a multiple of this.
            init_scale: rows start normal with standard deviation `init_scale / √width` and kernels with 1/√d_model, so
                that an embedding's entries have the standard deviation of a `Table`'s, `init_scale / √d_model`.
            cutoffs: places that end a band, or "auto"; see `headlab.embeddings.cutoffs`.
            projections: False gives no band a kernel: all are as wide as the model, and `div_value` must be 1.
            token_counts: [V]; tokens are put in bands by descending count. None: by their ids.

        Raises:
            ValueError: naming the value and the range.
        """
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.cutoffs = resolve_cutoffs(
            cutoffs,
            vocab_size=vocab_size,
            d_model=d_model,
            div_value=div_value,
            token_counts=token_counts,
        )
        if not projections and div_value != 1:
            raise ValueError(
                f"projections is False and div_value {div_value}; bands without a kernel are as wide as the model: "
                "set div_value=1"
            )
        self.sizes = band_sizes(self.cutoffs, vocab_size)
        widths = band_widths(d_model, div_value, len(self.sizes))
        self.order = TokenOrder(self.cutoffs, vocab_size, token_counts)
        given: dict[str, Any] = dict(
            rngs=rngs, vocab_multiple=vocab_multiple, init_scale=init_scale
        )
        self.bands = nnx.List(
            [
                Band(size, width, d_model, projected=projections and i > 0, **given)
                for i, (size, width) in enumerate(zip(self.sizes, widths, strict=True))
            ]
        )

    def __call__(self, ids: Int[Array, "..."], dtype=jnp.float32) -> Float[Array, "... d_model"]:
        """Embeddings of `ids` in `dtype`; an id outside [0, vocab_size) gives a row of NaN.

        Each band looks up its own ids and gives zeros for all others, whose rows get no gradient.
        """
        known, own, row = self.order.locate(ids)
        total = jnp.zeros((*ids.shape, self.d_model), dtype)
        for i, band in enumerate(self.bands):
            weight = band.weight[...]
            # −1 is no row of any shard, and a look-up there gives 0
            part, _ = take_rows(weight, jnp.where(known & (own == i), row, -1))
            part = sum_shards(part.astype(dtype), weight)
            total = total + (part if band.kernel is None else linear(part, band.kernel[...]))
        return jnp.where(known[..., None], total, jnp.nan)

    def parameter_count(self) -> int:
        """Parameters without padding."""
        kernels = sum(band.kernel.size for band in self.bands if band.kernel is not None)
        return kernels + sum(
            size * band.weight.shape[1] for size, band in zip(self.sizes, self.bands, strict=True)
        )


def checked_bands(
    embedding: Any, cutoffs: tuple[int, ...], shapes: Sequence[tuple[int, int]]
) -> list[Band]:
    """The bands of the embedding that a head is tied to; ValueError unless they have these cutoffs and shapes."""
    if not isinstance(embedding, Adaptive):
        raise ValueError(
            "a head tied to the bands of an AdaptiveEmbedding needs the one that its `input_embedding` makes: pass "
            f"embedding=, not {type(embedding).__name__}"
        )
    found = [all_rows_shape(band.weight[...]) for band in embedding.bands]
    if embedding.cutoffs != cutoffs or found != list(shapes):
        raise ValueError(
            f"the embedding has cutoffs {embedding.cutoffs} and bands {found}; the head has {cutoffs} and "
            f"{list(shapes)}: build both with the same cutoffs, div_value and vocab_multiple{UNMARKED}"
        )
    return list(embedding.bands)
