"""Mixtape: a mixture of K contexts whose priors differ from token to token (Yang et al. 2019).

    t_v = map(Σ_k π_kv · (c_k·w_v) + b_v),   c_k = tanh(h·H_k),   p = softmax(t)

The priors π_kv are the leaves of a binary tree of K − 1 sigmoids of v_v·tanh(h·U_j) + h·u_j + β_vj. Only frequent
tokens have gates (v, β) of their own; the rest share those of h·u_j alone, so that their logits are one product with
one mixed context. One softmax normalises both, in place of the K of a mixture of softmaxes.
"""

import functools
import inspect
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from headlab.costs import HeadCost, Mode
from headlab.embeddings import Embedding, init_rows, padded_size
from headlab.embeddings.adaptive import Adaptive as AdaptiveEmbedding
from headlab.embeddings.adaptive import TokenOrder, checked_bands
from headlab.heads.base import Loss, Segment
from headlab.heads.blocks import cut_rows, numbered
from headlab.heads.folded import folded_report
from headlab.heads.linear import LinearHead, linear_reason
from headlab.heads.output_matrix import Projection, latent_width, matrix_cost
from headlab.ops import LinearSpec, Statistics, TokenReport, block_logits, linear_statistics
from headlab.ops.mixtape import (
    MixtapeRows,
    MixtapeSpec,
    MixtapeStates,
    Part,
    join_statistics,
    mix,
    mixtape_statistics,
)
from headlab.ops.shards import sum_shards, take_rows


class MixtapeNormaliser(NamedTuple):
    """log p(v) = (t_v − max) − log_sum, both [tokens]."""

    states: MixtapeStates | None  # for the frequent tokens; None where there are none
    mixed: jax.Array | None  # for the rest, [tokens, d_latent]
    max: jax.Array
    log_sum: jax.Array


class Rows(nnx.Module):
    """A row a token of a segment, `[padded size, width]`, None where they are tied, and biases a token."""

    def __init__(self, weight: jax.Array | None, bias: jax.Array | None):
        self.weight = None if weight is None else nnx.Param(weight)
        self.bias = None if bias is None else nnx.Param(bias)


class Mixtape(LinearHead):
    """A mixture in logit space with a gate a frequent token; see the module for its formula."""

    ties_to: Literal["nothing", "adaptive"]

    def __init__(
        self,
        *,
        vocab_size: int,
        d_model: int,
        rngs: nnx.Rngs,
        vocab_multiple: int = 1,
        init_scale: float = 0.25,
        token_counts: np.ndarray | None = None,
        n_experts: int = 4,
        d_latent: int | None = None,
        d_gate: int = 64,
        frequent_share: float = 0.1,
        tied: bool = False,
        bias: bool = False,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        logits_dtype: Literal["float32", "bfloat16"] = "float32",
    ):
        """
        Args:
            token_counts: counts `[vocab_size]` that say which tokens are frequent; equal ones by ascending id. None:
                the lowest ids are.
            n_experts: K, a power of two. One expert has no gates and is a linear head over c_1.
            d_latent: width of the contexts and of w, ≥ 1; None is d_model.
            d_gate: width of v, ≥ 1.
            frequent_share: share of tokens with gates of their own, in (0, 1]; rounded, one token at least.
            tied: take the model's input embedding for w; needs d_latent = d_model. The embedding's rows then are in
                the order of frequency, in two bands (see `headlab.embeddings.adaptive.Adaptive`), as own ones are,
                which start normal with standard deviation `init_scale / √d_latent`.
            bias: adds a learned bias a token, zero at first.
            vocab_multiple: the rows of the frequent tokens and those of the rest are each padded to a multiple of this.
            softcap, logit_scale, logits_dtype: see `LinearHead`.

        H, U and u start normal with standard deviation 1/√d_model, v with 1/√d_gate, β at zero.

        Raises:
            ValueError: naming the value and the range.
        """
        super().__init__(
            vocab_size=vocab_size,
            d_model=d_model,
            vocab_multiple=vocab_multiple,
            softcap=softcap,
            logit_scale=logit_scale,
            logits_dtype=logits_dtype,
        )
        self.d_latent = latent_width(d_latent, d_model, tied=tied)
        if n_experts < 1 or n_experts & (n_experts - 1):
            raise ValueError(f"n_experts is {n_experts}; it must be a power of two: 1, 2, 4, …")
        if d_gate < 1:
            raise ValueError(f"d_gate is {d_gate}; it must be at least 1")
        if not 0 < frequent_share <= 1:
            raise ValueError(f"frequent_share is {frequent_share}; it must be in (0, 1]")
        self.n_experts, self.d_gate, self.biased = n_experts, d_gate, bias
        frequent = _frequent(n_experts, frequent_share, vocab_size)
        self.sizes = (frequent, vocab_size - frequent)
        self.padded = tuple(padded_size(n, vocab_multiple) if n else 0 for n in self.sizes)
        self.cutoffs = _cutoffs(frequent, vocab_size)
        self.order = None if tied else TokenOrder(self.cutoffs, vocab_size, token_counts)
        self.ties_to = "adaptive" if tied else "nothing"

        def rows(size: int, padded: int) -> Rows | None:
            if not size:
                return None
            key = rngs.params()
            weight = None if tied else init_rows(key, size, padded, self.d_latent, init_scale)
            return Rows(weight, jnp.zeros(padded) if bias else None)

        def project(width: int) -> Projection | None:
            return Projection(d_model, width, rngs=rngs) if width else None

        nodes = n_experts - 1
        self.frequent, self.rest = (
            rows(*sizes) for sizes in zip(self.sizes, self.padded, strict=True)
        )
        self.context = Projection(d_model, n_experts * self.d_latent, rngs=rngs)  # H
        self.shared = project(nodes)  # u
        self.gate_context = project(nodes * d_gate)  # U
        self.gate = (
            Rows(
                init_rows(rngs.params(), frequent, self.padded[0], d_gate, 1.0),  # v
                jnp.zeros((self.padded[0], nodes)),  # β
            )
            if nodes
            else None
        )

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
        """The embedding that the model builds for this head: where it is tied, one with its two bands of rows."""
        given: Any = dict(rngs=rngs, vocab_multiple=vocab_multiple, init_scale=init_scale)
        if not options.get("tied", False):
            return super().input_embedding(vocab_size=vocab_size, d_model=d_model, **given)
        defaults = inspect.signature(cls.__init__).parameters
        n_experts, share = (
            options.get(key, defaults[key].default) for key in ("n_experts", "frequent_share")
        )
        cutoffs = _cutoffs(_frequent(n_experts, share, vocab_size), vocab_size)
        bands: Any = dict(cutoffs=cutoffs, div_value=1.0, projections=False)
        return AdaptiveEmbedding(vocab_size, d_model, token_counts=token_counts, **given, **bands)

    # --- states and rows ---------------------------------------------------------------------------------------

    def _states(self, h) -> tuple[MixtapeStates | None, jax.Array | None]:
        """(what the frequent tokens need, the mixed context of the rest); None for a segment without tokens."""
        contexts = self.context.contexts(h, self.d_latent)
        if self.shared is None or self.gate_context is None:
            return None, contexts[:, 0]
        shared = self.shared.wide(h)
        states = MixtapeStates(contexts, self.gate_context.contexts(h, self.d_gate), shared)
        if self.rest is None:
            return states, None
        leaves = [contexts[:, k].astype(shared.dtype) for k in range(self.n_experts)]
        gates = [jax.nn.sigmoid(shared[:, j, None]) for j in range(self.n_experts - 1)]
        return states, mix(leaves, gates).astype(h.dtype)

    def _order(self, embedding) -> TokenOrder:
        if self.order is None:
            self._bands(embedding)
            return embedding.order
        return self.order

    def _bands(self, embedding) -> list[jax.Array]:
        """The rows of the embedding's bands, checked to be this head's."""
        shapes = [(padded, self.d_latent) for padded in self.padded if padded]
        return [band.weight[...] for band in checked_bands(embedding, self.cutoffs, shapes)]

    def _weights(self, embedding) -> tuple[jax.Array | None, jax.Array | None]:
        """The rows w of both segments, [padded size, d_latent]."""
        if self.ties_to == "nothing":
            return _value(self.frequent, "weight"), _value(self.rest, "weight")
        bands = iter(self._bands(embedding))
        frequent, rest = (next(bands) if size else None for size in self.sizes)
        return frequent, rest

    def _segment_rows(self, embedding) -> list[tuple[bool, Any]]:
        """(whether it is the frequent one, `MixtapeRows` or else (weight, bias)) of each segment that has tokens."""
        found: list[tuple[bool, Any]] = []
        frequent, rest = self._weights(embedding)
        if frequent is not None:
            gate, gate_bias = _value(self.gate, "weight"), _value(self.gate, "bias")
            bias = _value(self.frequent, "bias")
            found.append((True, MixtapeRows(frequent, gate, gate_bias, bias)))
        if rest is not None:
            found.append((False, (rest, _value(self.rest, "bias"))))
        return found

    def _specs(self) -> tuple[MixtapeSpec, LinearSpec]:
        frequent, rest = (self.spec._replace(vocab_size=size) for size in self.sizes)
        return MixtapeSpec(frequent), rest

    # --- the contract ------------------------------------------------------------------------------------------

    def segments(self) -> tuple[Segment, ...]:
        named = zip(("frequent", "rest"), self.sizes, self.padded, strict=True)
        return tuple(Segment(*both) for both in named if both[1])

    def _statistics(self, states, mixed, targets, embedding) -> Statistics:
        """Of all tokens together."""
        parts = []
        known, band, row = self._order(embedding).locate(targets)
        for place, (gated, rows) in enumerate(self._segment_rows(embedding)):
            holds = band == place
            # An unknown id is unknown in both segments, so that each gives NaN.
            own = jnp.where(known, jnp.where(holds, row, 0), -1)
            if gated:
                stats = mixtape_statistics(states, rows, own, self._specs()[0])
            else:
                stats = linear_statistics(mixed, rows[0], rows[1], own, self._specs()[1])
            parts.append(Part(stats, self.sizes[0 if gated else 1], holds))
        return join_statistics(parts)

    def normalise(self, h, embedding):
        states, mixed = self._states(h)
        nobody = jnp.zeros(h.shape[0], jnp.int32)
        stats = self._statistics(states, mixed, nobody, embedding)
        return MixtapeNormaliser(states, mixed, stats.max, stats.log_sum)

    def log_prob_block(self, h, norm, segment, start, size, embedding):
        gated = segment.name == "frequent"
        rows = dict(self._segment_rows(embedding))[gated]
        weight = rows[0]
        rows = cut_rows(rows, start, size)
        log_probs = (self._logits(norm, rows, gated) - norm.max[:, None]) - norm.log_sum[:, None]
        first, token = 0 if gated else self.sizes[0], self._order(embedding).token[...]
        return numbered(
            log_probs, start, segment.size, weight, lambda place: jnp.take(token, first + place)
        )

    def _logits(self, norm, rows, gated: bool):
        """The logits [tokens, rows] of rows of one segment."""
        spec, linear_spec = self._specs()
        if gated:
            return spec.logits(spec.products(norm.states, rows)).T
        return block_logits(norm.mixed, rows[0], rows[1], linear_spec)

    def log_prob_at(self, h, norm, ids, embedding):
        known, band, row = self._order(embedding).locate(ids)
        logits = jnp.zeros_like(norm.max)
        for place, (gated, rows) in enumerate(self._segment_rows(embedding)):
            taken, mine = take_rows(rows, jnp.where(band == place, row, -1))
            found = jax.vmap(functools.partial(self._own_logit, gated=gated))(norm, taken)
            logits = logits + sum_shards(jnp.where(mine, found, 0), rows[0])
        return jnp.where(known, (logits - norm.max) - norm.log_sum, jnp.nan)

    def _own_logit(self, norm, row, *, gated: bool):
        """The logit of one position and one row."""
        norm, row = (jax.tree.map(lambda a: a[None], tree) for tree in (norm, row))
        return self._logits(norm, row, gated)[0, 0]

    def z_penalty(self, norm):
        """lse²: there is one softmax."""
        return (norm.max + norm.log_sum) ** 2

    def _report(self, h, ids, k, embedding) -> TokenReport:
        return folded_report(self, h, ids, k, embedding)

    def _block_rows(self, tokens, segment):
        held = 2 * self.n_experts - 1 if segment.name == "frequent" else 1
        return super()._block_rows(tokens * held, segment)

    def _nll(self, h, targets, embedding):
        return self._statistics(*self._states(h), targets, embedding).nll

    def _loss(self, h, targets, where, embedding, z_loss_weight, label_smoothing) -> Loss:
        stats = self._statistics(*self._states(h), targets, embedding)
        objective = (1 - label_smoothing) * stats.nll + label_smoothing * stats.uniform_nll
        objective = objective + z_loss_weight * (stats.max + stats.log_sum) ** 2
        nats = jnp.sum(jnp.where(where, jax.lax.stop_gradient(stats.nll), 0))
        weight = jnp.sum(where, dtype=nats.dtype)
        return Loss(jnp.sum(jnp.where(where, objective, 0)), nats, weight, {})

    def rank_bound(self) -> int | None:
        """min(V, d_latent + 1 + frequent tokens), 1 more with a bias; None where nothing is shared, or with a soft cap.

        The logits of the rest are products with one context; each frequent token adds one column, and the normaliser
        one more. One expert has no frequent tokens: d_latent + 1.
        """
        if self.spec.logit_map.softcap is not None or self.rest is None:
            return None
        return min(self.vocab_size, self.d_latent + 1 + self.sizes[0] + self.biased)

    def rank_reason(self) -> str:
        if self.rest is None and self.spec.logit_map.softcap is None:
            return "every token mixes its logits with gates of its own, which aren't linear (Yang et al. 2019)"
        shared = linear_reason(self.spec, f"d_latent = {self.d_latent}", biased=self.biased)
        if self.spec.logit_map.softcap is not None or not self.sizes[0]:
            return shared
        return (
            f"{shared}; each of the {self.sizes[0]} frequent tokens, with gates of its own, adds a column "
            "(Yang et al. 2019)"
        )

    def output_matrix(self, embedding=None):
        return None  # a context of its own for each frequent token

    def cost(self, mode: Mode, token_counts=None) -> HeadCost:
        """All logits for every token: K products and K − 1 gates of frequent tokens, one product of the rest."""
        frequent, rest = self.sizes
        nodes = self.n_experts - 1
        kernels = self.d_model * (self.n_experts * self.d_latent + nodes * (self.d_gate + 1))
        gates = frequent * (self.d_gate + nodes)
        biases = self.vocab_size * self.biased
        matrix = self.vocab_size * self.d_latent
        beside = kernels + gates + biases
        return matrix_cost(
            mode,
            own=beside + (matrix if self.ties_to == "nothing" else 0),
            read=beside + matrix,
            multiplied=kernels
            + frequent * (self.n_experts * self.d_latent + nodes * self.d_gate)
            + rest * self.d_latent,
        )


def _frequent(n_experts: int, frequent_share: float, vocab_size: int) -> int:
    """How many tokens have gates of their own."""
    return 0 if n_experts == 1 else min(max(1, round(frequent_share * vocab_size)), vocab_size)


def _cutoffs(frequent: int, vocab_size: int) -> tuple[int, ...]:
    return (frequent,) if 0 < frequent < vocab_size else ()


def _value(module, name: str) -> Any:
    parameter = getattr(module, name, None)
    return None if parameter is None else parameter[...]
