"""The adaptive softmax: rarer tokens in tails of their own, of narrower rows (Grave et al. 2017, arXiv:1609.04309).

Tokens are ordered by descending count and cut into a shortlist and J tails. The head is one softmax over the shortlist
and the J tails; a token of tail i has log p = log p_head(tail i) + log p_i(token), p_i the softmax of tail i:

    head logits  = map(h · weightᵀ + bias) + offset,   offset = 0 for the shortlist, ln(size of tail i) for tail i
    tail logits  = map((h · kernel_i) · weight_iᵀ),    rows of width d_model // div_valueⁱ

map as in `headlab.heads.linear`. The offset is a constant: without it each tail, whatever its size, starts as probable
as one token of the shortlist.
"""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from headlab.costs import HeadCost, Mode, passes
from headlab.embeddings.cutoffs import check_counts
from headlab.heads.adaptive_rows import AdaptiveRows
from headlab.heads.base import Loss, Segment
from headlab.heads.blocks import cut_rows, numbered
from headlab.heads.linear import Normaliser, linear_reason, own_logits
from headlab.ops import (
    Statistics,
    Sums,
    linear,
    linear_statistics,
    softmax_loss,
    softmax_statistics,
)
from headlab.ops.clusters import (
    cluster_loss,
    cluster_statistics,
)
from headlab.ops.linear_logits import accumulator
from headlab.ops.mixtape import Part, join_statistics


class AdaptiveNormaliser(NamedTuple):
    """log p = (t − max) − log_sum in each softmax, all [tokens]."""

    head: Normaliser
    log_tails: jax.Array  # [tokens, J]: log p_head of each tail
    tails: tuple[Normaliser, ...]


class Adaptive(AdaptiveRows):
    """An adaptive softmax over `vocab_size` tokens; see the module for its formula.

    Training and scoring of given targets do the work of a token's own tail alone; the whole distribution
    (`log_probs`, `top_k`, `entropy`) needs every tail for every position.
    """

    smoothing_refused: ClassVar[str | None] = (
        "an adaptive softmax refuses it, for it needs the log-probability of every token at every position, and so the "
        "work that the tails save; use another head, or no smoothing"
    )
    stacking_refused: ClassVar[str | None] = (
        "how long its loops over the tails are depends on the tokens of a batch, and loops of stacked runs would all "
        "be as long as the longest; use another head"
    )

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

    # --- the contract -------------------------------------------------------------------------------------------

    def segments(self) -> tuple[Segment, ...]:
        names = ("shortlist", *(f"tail {i}" for i in range(1, len(self.sizes))))
        return tuple(map(Segment, names, self.sizes, (self.head_rows, *self.tail_rows)))

    def sum_in_blocks(self, sum_blocks: int | None) -> None:
        self.spec = self.spec._replace(sum_blocks=sum_blocks)

    @property
    def sum_blocks(self) -> int | None:
        return self.spec.sum_blocks

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
            log_probs = _log_probs(h, norm.head, cut_rows(rows, start, size), spec)
        else:
            weight = self._clusters(embedding)[i - 1].weight
            tail = norm.tails[i - 1]
            block = (cut_rows(weight, start, size), None)
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

    def rank_reason(self) -> str:
        if self.spec.logit_map.softcap is not None:
            return linear_reason(self.spec, f"d_model = {self.d_model}", biased=self.biased)
        tails = sum(size > 1 for size in self.sizes[1:])
        return (
            f"the lesser of two bounds: one linear part of d_model = {self.d_model} with its normaliser, one more for "
            f"each of {tails} tails of at least 2 tokens{' and one for the bias' if self.biased else ''}; or every "
            "column of the shortlist and, of each tail, the fewer of its tokens and its width + 1 (Grave et al. 2016)"
        )

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
