"""Where the rows of an adaptive softmax live: its own arrays, or those of the embedding that it is tied to."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from headlab.embeddings import Embedding, init_rows, padded_size
from headlab.embeddings.adaptive import Adaptive as AdaptiveEmbedding
from headlab.embeddings.adaptive import Band, TokenOrder, checked_bands
from headlab.embeddings.cutoffs import band_sizes, band_widths, resolve_cutoffs
from headlab.heads.base import Head
from headlab.heads.linear import LinearHead
from headlab.ops.clusters import (
    Cluster,
    ClusterSpec,
    HeadSpec,
)
from headlab.ops.linear_logits import accumulator
from headlab.ops.shards import UNMARKED, all_rows_shape, first_row, sum_shards, take_rows


class Tail(nnx.Module):
    """One tail's own arrays: a kernel `[d_model, width]` and rows `[padded size, width]`, None where they are tied."""

    def __init__(self, kernel: jax.Array | None, weight: jax.Array | None):
        self.kernel = None if kernel is None else nnx.Param(kernel)
        self.weight = None if weight is None else nnx.Param(weight)


class Standing(nnx.Module):
    """What stands for the tails in a tied head: a row `[J, d_model]` and with `head_bias` a bias `[J]` each."""

    def __init__(self, weight: nnx.Param, bias: nnx.Param | None):
        self.weight = weight
        self.bias = bias


class AdaptiveRows(Head):
    """The arrays of an adaptive softmax; see `headlab.heads.adaptive` for its formula."""

    def __init__(
        self,
        *,
        vocab_size: int,
        d_model: int,
        rngs: nnx.Rngs,
        vocab_multiple: int = 1,
        init_scale: float = 0.25,
        token_counts: np.ndarray | None = None,
        cutoffs: tuple[int, ...] | Literal["auto"] = "auto",
        div_value: float = 4.0,
        head_bias: bool = False,
        cluster_offset: bool = True,
        tied: bool = False,
        tie_projections: bool = False,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        logits_dtype: Literal["float32", "bfloat16"] = "float32",
    ):
        """
        Args:
            token_counts: counts of the training text, [V]; tokens are ordered by them, equal ones by id. None: the
                order of ids.
            cutoffs: places of the order that end the shortlist and each tail but the last: strictly ascending, inside
                1 … V − 1. () is one full softmax. "auto" chooses by `choose_cutoffs` and needs token_counts.
            div_value: tail i = 1, 2, … has rows of width d_model // div_valueⁱ, at least 1; ≥ 1. 4 is the paper's.
            head_bias: adds a learned bias to the products of the head (shortlist and tails), zero at first.
            cluster_offset: adds the constant ln(size of tail) to each tail's logit, after the map. False is the
                paper's, and PyTorch's.
            tied: the rows of the shortlist and the tails are those of the model's `AdaptiveEmbedding` (Baevski & Auli
                2019); what stands for the tails in the head, and the kernels, stay the head's own.
            tie_projections: the kernels are those of the embedding too, transposed; needs `tied`.
            softcap, logit_scale, logits_dtype: see `LinearHead`; for the products of head and tails alike.
            vocab_multiple: the rows of the head's matrix and of each tail are padded to a multiple of this.
            init_scale: rows start normal with standard deviation `init_scale / √width`, kernels with 1/√d_model.

        Raises:
            ValueError: naming the value and the range.
        """
        # The checks of these, and the spec, are those of a linear head.
        plain = LinearHead(
            vocab_size=vocab_size,
            d_model=d_model,
            vocab_multiple=vocab_multiple,
            softcap=softcap,
            logit_scale=logit_scale,
            logits_dtype=logits_dtype,
        )
        if tie_projections and not tied:
            raise ValueError("tie_projections is True and tied False; set tied=True, or neither")
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.cutoffs = resolve_cutoffs(
            cutoffs,
            vocab_size=vocab_size,
            d_model=d_model,
            div_value=div_value,
            token_counts=token_counts,
        )
        self.sizes = band_sizes(self.cutoffs, vocab_size)
        self.widths = band_widths(d_model, div_value, len(self.sizes))
        self.spec = plain.spec
        self.cluster_offset = cluster_offset
        self.tied = tied
        self.tie_projections = tie_projections
        self.ties_to = "adaptive" if tied else "nothing"
        self.order = None if tied else TokenOrder(self.cutoffs, vocab_size, token_counts)
        self.tail_rows = tuple(padded_size(size, vocab_multiple) for size in self.sizes[1:])
        # Tied, the rows of the shortlist are the embedding's and those that stand for the tails are apart.
        own_rows = self.sizes[0] + (0 if tied else len(self.sizes) - 1)
        self.head_rows = padded_size(own_rows, vocab_multiple)
        self.biased = head_bias
        self._make_parameters(rngs, own_rows, init_scale)

    def _make_parameters(self, rngs, own_rows, init_scale):
        n_tails = len(self.sizes) - 1

        def draw(real, rows):
            return init_rows(rngs.params(), real, rows, self.d_model, init_scale)

        def bias(rows):
            return nnx.Param(jnp.zeros(rows)) if self.biased else None

        self.weight = None if self.tied else nnx.Param(draw(own_rows, self.head_rows))
        self.bias = bias(self.head_rows)
        standing = self.tied and n_tails
        self.standing = (
            Standing(nnx.Param(draw(n_tails, n_tails)), bias(n_tails)) if standing else None
        )
        tails = []
        for size, rows, width in zip(self.sizes[1:], self.tail_rows, self.widths[1:], strict=True):
            kernel = weight = None
            if not self.tie_projections:
                kernel = jax.random.normal(rngs.params(), (self.d_model, width))
                kernel = kernel / self.d_model**0.5
            if not self.tied:
                weight = init_rows(rngs.params(), size, rows, width, init_scale)
            tails.append(Tail(kernel, weight))
        self.tails = nnx.List(tails)

    # --- what the model builds for it ---------------------------------------------------------------------------

    @classmethod
    def resolve_options(cls, options: dict, *, vocab_size, d_model, token_counts) -> dict:
        """The options with cutoffs "auto" turned into the numbers that these counts give."""
        cutoffs = resolve_cutoffs(
            options.get("cutoffs", "auto"),
            vocab_size=vocab_size,
            d_model=d_model,
            div_value=options.get("div_value", 4.0),
            token_counts=token_counts,
        )
        return {**options, "cutoffs": cutoffs}

    @classmethod
    def input_embedding(
        cls,
        *,
        vocab_size: int,
        d_model: int,
        rngs: nnx.Rngs,
        vocab_multiple: int = 1,
        init_scale: float = 0.25,
        token_counts: np.ndarray | None = None,
        **options: Any,
    ) -> Embedding:
        """The embedding that the model builds for this head: an adaptive one of the same bands where it is tied."""
        given: Any = dict(rngs=rngs, vocab_multiple=vocab_multiple, init_scale=init_scale)
        if not options.get("tied", False):
            return super().input_embedding(vocab_size=vocab_size, d_model=d_model, **given)
        bands = {key: options[key] for key in ("cutoffs", "div_value") if key in options}
        return AdaptiveEmbedding(vocab_size, d_model, token_counts=token_counts, **given, **bands)

    # --- its arrays ---------------------------------------------------------------------------------------------

    def _bands(self, embedding) -> list[Band]:
        """The embedding's bands, checked to be this head's."""
        rows = zip(self.tail_rows, self.widths[1:], strict=True)
        return checked_bands(embedding, self.cutoffs, [(self.head_rows, self.d_model), *rows])

    def _order(self, embedding) -> TokenOrder:
        if self.order is None:
            self._bands(embedding)
            return embedding.order
        return self.order

    def _head(self, embedding):
        """(rows (weight, bias, offset), spec) of the head's own matrix: shortlist, tails if untied, padding."""
        weight = self._bands(embedding)[0].weight[...] if self.weight is None else self.weight[...]
        if all_rows_shape(weight)[0] != self.head_rows:
            raise ValueError(
                f"the head's matrix has {all_rows_shape(weight)[0]} rows, not {self.head_rows}{UNMARKED}"
            )
        shortlist = self.sizes[0]
        real = shortlist if self.tied else shortlist + len(self.tails)
        offset = np.zeros(self.head_rows)
        if self.cluster_offset and not self.tied:
            offset[shortlist:real] = np.log(self.sizes[1:])
        own = jax.lax.dynamic_slice_in_dim(
            jnp.asarray(offset, accumulator(weight.dtype)), first_row(weight), weight.shape[0]
        )
        bias = None if self.bias is None else self.bias[...]
        return (weight, bias, own), HeadSpec(*self.spec._replace(vocab_size=real))

    def _standing(self, embedding):
        """(rows (weight, bias, offset), spec) of what stands for the J tails in the head, J ≥ 1; not sharded."""
        n_tails = len(self.tails)
        spec = HeadSpec(*self.spec._replace(vocab_size=n_tails, sum_blocks=None, vocab_block=None))
        if self.standing is not None:
            weight = self.standing.weight[...]
            bias = None if self.standing.bias is None else self.standing.bias[...]
        else:
            (weight, bias, _), _ = self._head(embedding)
            numbers = self.sizes[0] + jnp.arange(n_tails, dtype=jnp.int32)
            taken, _ = take_rows((weight, bias), numbers)
            weight, bias = sum_shards(taken, weight)
        offset = np.log(self.sizes[1:]) if self.cluster_offset else np.zeros(n_tails)
        return (weight, bias, jnp.asarray(offset, accumulator(weight.dtype))), spec

    def _clusters(self, embedding) -> tuple[Cluster, ...]:
        tails: Any = self.tails
        bands: Any = self._bands(embedding)[1:] if self.tied else tails
        kernels = (
            [band.kernel[...].T for band in bands]
            if self.tie_projections
            else [tail.kernel[...] for tail in tails]
        )
        return tuple(Cluster(k, band.weight[...]) for k, band in zip(kernels, bands, strict=True))

    def _cluster_spec(self) -> ClusterSpec:
        return ClusterSpec(self.sizes[1:], *self.spec[1:])

    def _places(self, ids, embedding):
        """(row in the head, tail 0 … J−1, row in the tail) of each id, all [...].

        An id outside [0, V) has the row −1 in the head, and like one of the shortlist the tail −1, which is none.
        """
        known, band, row = self._order(embedding).locate(ids)
        head = jnp.where(band == 0, row, self.sizes[0] - 1 + band)
        return jnp.where(known, head, -1), jnp.where(known, band, 0) - 1, row
