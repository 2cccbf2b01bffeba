"""The adaptive softmax: rarer tokens in tails of their own, of narrower rows (Grave et al. 2017, arXiv:1609.04309).

Tokens are ordered by descending count and cut into a shortlist and J tails. The head is one softmax over the shortlist
and the J tails; a token of tail i has log p = log p_head(tail i) + log p_i(token), p_i the softmax of tail i:

    head logits  = map(h · weightᵀ + bias) + offset,   offset = 0 for the shortlist, ln(size of tail i) for tail i
    tail logits  = map((h · kernel_i) · weight_iᵀ),    rows of width d_model // div_valueⁱ

map as in `headlab.heads.linear`. The offset is a constant: without it each tail, whatever its size, starts as probable
as one token of the shortlist.
"""

from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from headlab.costs import HeadCost, Mode, passes
from headlab.embeddings import Embedding, init_rows, padded_size
from headlab.embeddings.adaptive import Adaptive as AdaptiveEmbedding
from headlab.embeddings.adaptive import TokenOrder
from headlab.embeddings.cutoffs import band_sizes, band_widths, check_counts, resolve_cutoffs
from headlab.heads.base import Head, Loss, Segment, numbered
from headlab.heads.linear import UNMARKED, LinearHead, Normaliser, all_rows_shape, own_logits
from headlab.ops import (
    Statistics,
    Sums,
    linear,
    linear_statistics,
    softmax_loss,
    softmax_statistics,
)
from headlab.ops.clusters import (
    Cluster,
    ClusterSpec,
    HeadSpec,
    cluster_loss,
    cluster_statistics,
)
from headlab.ops.linear_logits import accumulator
from headlab.ops.mixtape import Part, join_statistics
from headlab.ops.shards import first_row, sum_shards, take_rows


class AdaptiveNormaliser(NamedTuple):
    """log p = (t − max) − log_sum in each softmax, all [tokens]."""

    head: Normaliser
    log_tails: jax.Array  # [tokens, J]: log p_head of each tail
    tails: tuple[Normaliser, ...]


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


class Adaptive(Head):
    """An adaptive softmax over `vocab_size` tokens; see the module for its formula.

    Training and scoring of given targets do the work of a token's own tail alone; the whole distribution
    (`log_probs`, `top_k`, `entropy`) needs every tail for every position.
    """

    smoothing_refused: ClassVar[str | None] = (
        "an adaptive softmax refuses it, for it needs the log-probability of every token at every position, and so the "
        "work that the tails save; use another head, or no smoothing"
    )

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

    def _bands(self, embedding):
        """The embedding's bands, checked to be this head's."""
        if not isinstance(embedding, AdaptiveEmbedding):
            raise ValueError(
                "a tied adaptive head needs the model's AdaptiveEmbedding: pass embedding=, not "
                f"{type(embedding).__name__}"
            )
        found = tuple(all_rows_shape(band.weight[...]) for band in embedding.bands)
        rows = zip(self.tail_rows, self.widths[1:], strict=True)
        shapes = ((self.head_rows, self.d_model), *rows)
        if embedding.cutoffs != self.cutoffs or found != shapes:
            raise ValueError(
                f"the embedding has cutoffs {embedding.cutoffs} and bands {found}; the head has {self.cutoffs} and "
                f"{shapes}: build both with the same cutoffs, div_value and vocab_multiple{UNMARKED}"
            )
        return embedding.bands

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

    def _head_statistics(self, h, head_row, embedding) -> Statistics:
        """Of the head's softmax over the shortlist and the tails."""
        rows, spec = self._head(embedding)
        if self.standing is None:
            return softmax_statistics(h, rows, head_row, spec)
        shortlist = self.sizes[0]
        tail = head_row >= shortlist
        # An unknown row is unknown in both parts, and each gives NaN.
        first = softmax_statistics(h, rows, jnp.where(tail, 0, head_row), spec)
        standing, own_spec = self._standing(embedding)
        numbers = jnp.where(tail, head_row - shortlist, 0)
        second = softmax_statistics(h, standing, numbers, own_spec)
        parts = [Part(first, shortlist, ~tail), Part(second, len(self.tails), tail)]
        return join_statistics(parts)

    def _clusters(self, embedding) -> tuple[Cluster, ...]:
        tails: Any = self.tails
        bands = self._bands(embedding)[1:] if self.tied else tails
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

    # --- the contract -------------------------------------------------------------------------------------------

    def segments(self) -> tuple[Segment, ...]:
        names = ("shortlist", *(f"tail {i}" for i in range(1, len(self.sizes))))
        return tuple(map(Segment, names, self.sizes, (self.head_rows, *self.tail_rows)))

    def sum_in_blocks(self, sum_blocks: int | None) -> None:
        self.spec = self.spec._replace(sum_blocks=sum_blocks)

    def normalise(self, h, embedding) -> AdaptiveNormaliser:
        """Every softmax at every position; the log-probability of each tail from the few rows of the head's."""
        nobody = jnp.zeros(h.shape[0], jnp.int32)
        stats = self._head_statistics(h, nobody, embedding)
        head = Normaliser(h, stats.max, stats.log_sum)
        tails = []
        for size, cluster in zip(self.sizes[1:], self._clusters(embedding), strict=True):
            latent = linear(h, cluster.kernel)
            own = self.spec._replace(vocab_size=size)
            stats = linear_statistics(latent, cluster.weight, None, nobody, own)
            tails.append(Normaliser(latent, stats.max, stats.log_sum))
        log_tails = jnp.zeros((h.shape[0], 0), accumulator(h.dtype))
        if tails:
            log_tails = _log_probs(h, head, *self._standing(embedding))
        return AdaptiveNormaliser(head, log_tails, tuple(tails))

    def log_prob_block(self, h, norm, segment, start, size, embedding):
        i = self.segments().index(segment)
        begin = (0, *self.cutoffs)[i]
        order = self._order(embedding).token[...]
        if i == 0:
            rows, spec = self._head(embedding)
            weight = rows[0]
            block = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, size), rows)
            log_probs = _log_probs(h, norm.head, block, spec)
        else:
            weight = self._clusters(embedding)[i - 1].weight
            tail = norm.tails[i - 1]
            block = (jax.lax.dynamic_slice_in_dim(weight, start, size), None)
            within = _log_probs(tail.context, tail, block, self.spec)
            log_probs = norm.log_tails[:, i - 1, None] + within
        return numbered(
            log_probs, start, segment.size, weight, lambda place: jnp.take(order, begin + place)
        )

    def log_prob_at(self, h, norm, ids, embedding):
        head_row, own, tail_row = self._places(ids, embedding)
        rows, spec = self._head(embedding)
        found = own_logits(spec, h, rows, jnp.maximum(head_row, 0))
        if self.standing is not None:
            standing, own_spec = self._standing(embedding)
            tail = head_row - self.sizes[0]
            logits = own_logits(own_spec, h, standing, jnp.maximum(tail, 0))
            found = jnp.where(tail < 0, found, logits)
        found = (found - norm.head.max) - norm.head.log_sum
        for i, cluster in enumerate(self._clusters(embedding)):
            mine = own == i
            numbers = jnp.where(mine, tail_row, 0)
            logits = own_logits(self.spec, norm.tails[i].context, (cluster.weight, None), numbers)
            within = (logits - norm.tails[i].max) - norm.tails[i].log_sum
            found = found + jnp.where(mine, within, 0)
        return jnp.where(head_row >= 0, found, jnp.nan)

    def z_penalty(self, norm):
        """lse_head² + Σ_i p_head(tail i)·lse_i², what a token drawn from the head itself would be charged on average.

        The loss charges a token lse_head², and lse_i² if it is in tail i, which needs no other tail.
        """
        penalty = (norm.head.max + norm.head.log_sum) ** 2
        for i, tail in enumerate(norm.tails):
            penalty = penalty + jnp.exp(norm.log_tails[:, i]) * (tail.max + tail.log_sum) ** 2
        return penalty

    def _nll(self, h, targets, embedding):
        head_row, own, tail_row = self._places(targets, embedding)
        head = self._head_statistics(h, head_row, embedding)
        clusters = self._clusters(embedding)
        tails = cluster_statistics(h, clusters, own, tail_row, self._cluster_spec())
        return head.nll + tails.nll

    def _loss(self, h, targets, where, embedding, z_loss_weight, label_smoothing) -> Loss:
        """The sums, and "tail_tokens", the number of counted tokens that are in a tail."""
        head_row, own, tail_row = self._places(targets, embedding)
        own = jnp.where(where, own, -1)
        z = dict(z_loss_weight=z_loss_weight)
        head = self._head_sums(h, head_row, where, embedding, z_loss_weight)
        clusters = self._clusters(embedding)
        tails = cluster_loss(h, clusters, own, tail_row, self._cluster_spec(), **z)
        in_tails = jnp.sum(own >= 0, dtype=head.nats.dtype)
        return Loss(
            head.objective + tails.objective,
            head.nats + tails.nats,
            head.weight,
            {"tail_tokens": in_tails},
        )

    def _head_sums(self, h, head_row, where, embedding, z_loss_weight) -> Sums:
        """What the head's softmax adds to the loss."""
        if self.standing is None:
            rows, spec = self._head(embedding)
            return softmax_loss(h, rows, head_row, where, spec, z_loss_weight=z_loss_weight)
        stats = self._head_statistics(h, jnp.where(where, head_row, 0), embedding)
        objective = stats.nll + z_loss_weight * (stats.max + stats.log_sum) ** 2
        objective, nats = (
            jnp.sum(jnp.where(where, a, 0)) for a in (objective, jax.lax.stop_gradient(stats.nll))
        )
        return Sums(objective, nats, jnp.sum(where, dtype=nats.dtype))

    # --- what it is and costs -----------------------------------------------------------------------------------

    def rank_bound(self) -> int | None:
        """The lesser of two bounds, and of V; a soft cap is not linear and promises nothing.

        A column of log p is one linear in h (d_model dimensions), plus −lse_head at every column and log p(tail) − lse
        of each tail at the columns of that tail: d_model + 1 + J + [head bias], where a tail of one token adds no
        dimension, for its column is that of the head. Or the columns of the shortlist, and of each tail the fewer of
        its tokens and width + 1.
        """
        if self.spec.logit_map.softcap is not None:
            return None
        wide_tails = sum(size > 1 for size in self.sizes[1:])
        together = self.d_model + 1 + wide_tails + self.biased
        pairs = zip(self.sizes[1:], self.widths[1:], strict=True)
        apart = self.sizes[0] + sum(min(size, width + 1) for size, width in pairs)
        return min(self.vocab_size, together, apart)

    def cost(self, mode: Mode, token_counts: np.ndarray | None = None) -> HeadCost:
        """The head for every token, and each tail for the share of tokens that are in it.

        2·d·(shortlist + J) operations a token, and 2·(d·width_i + width_i·size_i) a token of tail i; three times that
        in training. The shares are those of `token_counts`, or without them those of equally frequent tokens. Decoding
        needs the whole distribution: every tail for every token.
        """
        shares = np.ones(len(self.sizes)) if mode == "decoding" else self._shares(token_counts)
        n_tails = len(self.sizes) - 1
        rows = self.sizes[0] + n_tails
        matrix = self.d_model * rows
        bias = rows * self.biased
        flops, read = 2.0 * matrix, matrix + bias
        own = bias + (self.d_model * n_tails if self.tied else matrix)
        for size, width, share in zip(self.sizes[1:], self.widths[1:], shares[1:], strict=True):
            kernel, weight = self.d_model * width, width * size
            flops += 2.0 * share * (kernel + weight)
            read += kernel + weight
            own += (0 if self.tie_projections else kernel) + (0 if self.tied else weight)
        return HeadCost(own, float(flops * passes(mode)), 4.0 * read)

    def _shares(self, token_counts) -> np.ndarray:
        """The share of tokens in each band."""
        counts = check_counts(token_counts, self.vocab_size)
        if counts is None or not counts.sum():
            counts = np.ones(self.vocab_size)
        return np.add.reduceat(np.sort(counts)[::-1], (0, *self.cutoffs)) / counts.sum()


def _log_probs(h, norm: Normaliser, rows, spec):
    """Log-probabilities [tokens, rows] of these rows of a softmax."""
    logits = spec.logits(spec.products(h, rows)).T
    return (logits - norm.max[:, None]) - norm.log_sum[:, None]
