"""The Head contract: five methods that a head must write, and all that the base class derives from them.

A head turns hidden states h [..., d_model] into log-probabilities over `vocab_size` tokens. It owns its own
parameters and never the input embedding, which the model passes in.
"""

import functools
import inspect
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from headlab.costs import HeadCost, Mode
from headlab.embeddings import Embedding, Table
from headlab.heads.blocks import add_real
from headlab.heads.float64 import log_probs_float64
from headlab.heads.folded import folded_entropy, folded_report, folded_top_k
from headlab.heads.ordered import ordered_report
from headlab.ops import TokenReport, vary_like
from headlab.ops.shards import is_sharded, shard_count, sum_shards


class Segment(NamedTuple):
    """A run of rows that are computed alike, in the head's own row order; token ids ascend along it."""

    name: str
    size: int  # real tokens
    rows: int  # with padding; sharded over the vocabulary, each shard has an equal part of them


class Loss(NamedTuple):
    """Sums over the counted positions, float32; `objective` alone is differentiable."""

    objective: Array  # what training minimises: with z-loss and label smoothing
    nats: Array  # Σ −log p(target), pure
    weight: Array  # number of counted positions
    # the family's own sums over counted positions, each to be divided by `weight`
    metrics: dict[str, Array]


class Head(nnx.Module):
    """Base class of all heads."""

    #: what the head needs from the model: nothing, a `Table`, a `Factorised` or an `Adaptive` input embedding
    ties_to: Literal["nothing", "table", "factors", "adaptive"] = "nothing"
    #: why label smoothing is refused, for the heads that refuse it
    smoothing_refused: ClassVar[str | None] = None
    #: why runs with this head cannot be stacked by `jax.vmap`, for the heads of which they cannot
    stacking_refused: ClassVar[str | None] = None
    vocab_size: int
    d_model: int
    block_rows: int | None = None  # rows of one block in what is derived here; None: chosen by size

    # --- what a head may change --------------------------------------------------------------------------------

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
        """The input embedding that the model builds and owns for a head of these `options`: a plain table."""
        return Table(
            vocab_size, d_model, rngs=rngs, vocab_multiple=vocab_multiple, init_scale=init_scale
        )

    @classmethod
    def resolve_options(
        cls,
        options: dict[str, Any],
        *,
        vocab_size: int,
        d_model: int,
        token_counts: np.ndarray | None,
    ) -> dict[str, Any]:
        """`options` with every "auto" replaced by what it means here, as a run's config.json records it."""
        return options

    def output_matrix(
        self, embedding: Any = None
    ) -> tuple[Float[Array, "V width"], Float[Array, "V"] | None] | None:
        """(rows, biases or None) of all real tokens, by id, where logits are a map of context · rowᵀ + bias.

        None where no one matrix stands before the softmax. Rows must not be sharded.
        """
        return None

    def rank_reason(self) -> str:
        """Why `rank_bound` is what it is, with the source; here, what `rank_bound` says of itself."""
        return " ".join((inspect.getdoc(type(self).rank_bound) or "").split())

    # --- what a head must write --------------------------------------------------------------------------------

    def segments(self) -> tuple[Segment, ...]:
        """Static runs of homogeneous rows that together hold every real token once."""
        raise NotImplementedError

    def normalise(self, h: Float[Array, "tokens d_model"], embedding: Any) -> Any:
        """Per-token constants, a pytree of [tokens, ...] arrays, found in one blockwise pass."""
        raise NotImplementedError

    def log_prob_block(
        self,
        h: Float[Array, "tokens d_model"],
        norm: Any,
        segment: Segment,
        start,
        size: int,
        embedding: Any,
    ) -> tuple[Float[Array, "tokens size"], Int[Array, "size"]]:
        """Log-probabilities (nats) and token ids of rows `start … start+size−1` of a segment; `start` may be traced.

        Where rows are sharded over the vocabulary, these are rows of this shard; see `numbered`.
        """
        raise NotImplementedError

    def log_prob_at(
        self,
        h: Float[Array, "tokens d_model"],
        norm: Any,
        ids: Int[Array, "tokens"],
        embedding: Any,
    ) -> Float[Array, "tokens"]:
        """log p(ids) in nats, one token a position; NaN where an id is outside [0, vocab_size)."""
        raise NotImplementedError

    def z_penalty(self, norm: Any) -> Float[Array, "tokens"]:
        """This family's squared log-partition, nats²."""
        raise NotImplementedError

    def rank_bound(self) -> int | None:
        """The theorem's bound on the rank of a log-probability matrix, or None: nothing below V is promised."""
        raise NotImplementedError

    def cost(self, mode: Mode, token_counts: np.ndarray | None = None) -> HeadCost:
        """Parameters, operations a token and bytes read in `mode`."""
        raise NotImplementedError

    def sum_in_blocks(self, sum_blocks: int | None) -> None:
        """Sums over the vocabulary follow a balanced tree over so many blocks of rows; None: the fastest order.

        See `headlab.ops.softmax_tree`.
        """
        raise NotImplementedError

    @property
    def sum_blocks(self) -> int | None:
        """The K of `sum_in_blocks`."""
        raise NotImplementedError

    # --- what every head has -----------------------------------------------------------------------------------

    def nll(
        self,
        h: Float[Array, "*batch d_model"],
        targets: Int[Array, "*batch"],
        *,
        embedding: Any = None,
        where: Bool[Array, "*batch"] | None = None,
    ) -> Float[Array, "*batch"]:
        """−log p(target) in nats, float32; exactly 0 (gradient too) where `where` is False.

        An id outside [0, vocab_size) at a counted position gives NaN.
        """
        flat, ids, counted = self._flatten(h, targets, where)
        values = self._nll(flat, ids, embedding)
        return jnp.where(counted, values, 0).reshape(targets.shape)

    def _nll(self, h, targets, embedding):
        def one(h, targets):
            return -self.log_prob_at(h, self.normalise(h, embedding), targets, embedding)

        return jax.checkpoint(one)(h, targets)

    def loss(
        self,
        h: Float[Array, "*batch d_model"],
        targets: Int[Array, "*batch"],
        *,
        embedding: Any = None,
        where: Bool[Array, "*batch"] | None = None,
        z_loss_weight: float = 0.0,
        label_smoothing: float = 0.0,
    ) -> Loss:
        """Sums over the counted positions of one batch; divide by `weight` once, over the whole step.

        objective = Σ (1−α)·nll + α·(−(1/V) Σ_v log p(v)) + z_loss_weight·z_penalty. The two options are for training
        only: `nats` is the pure cross-entropy whatever they are.
        """
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing is {label_smoothing}; it must be in [0, 1)")
        if label_smoothing and self.smoothing_refused:
            raise ValueError(f"label_smoothing={label_smoothing}: {self.smoothing_refused}")
        if not 0 <= z_loss_weight < float("inf"):
            raise ValueError(f"z_loss_weight is {z_loss_weight}; it must be 0 or more, and finite")
        flat, ids, counted = self._flatten(h, targets, where)
        return self._loss(flat, ids, counted, embedding, z_loss_weight, label_smoothing)

    def _loss(self, h, targets, where, embedding, z_loss_weight, label_smoothing) -> Loss:
        @jax.checkpoint
        def one(h, targets):
            norm = self.normalise(h, embedding)
            nll = -self.log_prob_at(h, norm, targets, embedding)
            objective = nll
            if label_smoothing:
                total = self._total(h, norm, embedding, jnp.zeros_like(nll), add_real)
                mean = total / self.vocab_size
                objective = (1 - label_smoothing) * nll - label_smoothing * mean
            if z_loss_weight:
                objective = objective + z_loss_weight * self.z_penalty(norm)
            return objective, nll

        objective, nll = one(h, targets)
        nats = jnp.sum(jnp.where(where, jax.lax.stop_gradient(nll), 0))
        weight = jnp.sum(where, dtype=nats.dtype)
        return Loss(jnp.sum(jnp.where(where, objective, 0)), nats, weight, {})

    def log_probs(
        self, h: Float[Array, "*batch d_model"], *, embedding: Any = None, dtype=jnp.float32
    ) -> Float[Array, "*batch V"]:
        """Log-probabilities of all real tokens in nats, by token id; logsumexp over the last axis is 0.

        dtype float64 computes everything in float64 on a CPU and returns NumPy's float64; it refuses traced inputs,
        for under `jit` without x64 a cast would silently give float32.
        """
        if np.dtype(dtype) == np.float64:
            return log_probs_float64(self, h, embedding)
        return self._log_probs(h, embedding).astype(dtype)

    def _log_probs(self, h, embedding):
        flat = self._rows(h)
        norm = self.normalise(flat, embedding)
        sharded = self._sharded(embedding)
        blocks = [
            self.log_prob_block(flat, norm, segment, start, size, embedding)
            for segment in self.segments()
            for start, size in self._blocks(flat.shape[0], segment, sharded)
        ]
        values = jnp.concatenate([block for block, _ in blocks], axis=1)
        ids = jnp.concatenate([ids for _, ids in blocks])
        by_id = jnp.zeros((flat.shape[0], self.vocab_size), values.dtype)
        # Padding has an id that is no token's. A token is on one shard, and 0 on the others.
        by_id = sum_shards(by_id.at[:, ids].set(values, mode="drop"), *sharded)
        return by_id.reshape(*h.shape[:-1], self.vocab_size)

    def top_k(
        self, h: Float[Array, "*batch d_model"], k: int, *, embedding: Any = None
    ) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"]]:
        """(log-probabilities, ids) of the k most probable tokens, descending; equal ones by ascending id.

        0 ≤ k ≤ vocab_size, else ValueError. `[..., V]` is never built.
        """
        if not 0 <= k <= self.vocab_size:
            raise ValueError(
                f"k is {k}; it must be in 0 … {self.vocab_size}, the vocabulary's size"
            )
        values, ids = folded_top_k(self, self._rows(h), k, embedding)
        return values.reshape(*h.shape[:-1], k), ids.reshape(*h.shape[:-1], k)

    def entropy(
        self, h: Float[Array, "*batch d_model"], *, embedding: Any = None
    ) -> Float[Array, "*batch"]:
        """−Σ p·log p in nats; `[..., V]` is never built."""
        return folded_entropy(self, self._rows(h), embedding).reshape(h.shape[:-1])

    def token_report(
        self,
        h: Float[Array, "*batch d_model"],
        ids: Int[Array, "*batch"],
        k: int = 0,
        *,
        embedding: Any = None,
    ) -> TokenReport:
        """All that scoring asks of the token `ids` at each position, in one walk over the vocabulary.

        Its log-probability (NaN for an id outside [0, vocab_size)); its rank, 1 + the number of tokens that are more
        probable, or as probable and of a lower id (0 for an id outside); the k most probable tokens as `top_k` orders
        them; the entropy; and for heads of one softmax the log-partition, else None. All `[...]`, the top `[..., k]`.
        Linear heads make one pass, others two (`normalise`, then a fold), and with an order of sums all three, for the
        same bits on any number of shards; `[..., V]` is never built.

        A rank up to k is the place in the top. A greater one compares log-probabilities of float32 rounding: tokens
        closer to each other than that are counted either way.

        Raises ValueError for k outside 0 … vocab_size, or shapes that do not fit.
        """
        if not 0 <= k <= self.vocab_size:
            raise ValueError(
                f"k is {k}; it must be in 0 … {self.vocab_size}, the vocabulary's size"
            )
        flat, targets, _ = self._flatten(h, ids, None)
        # one at least, so that the rank 1 is always the token of greedy decoding
        made = functools.partial(ordered_report, self) if self.sum_blocks else self._report
        report = made(flat, targets, max(k, 1), embedding)
        report = report._replace(
            top_log_probs=report.top_log_probs[:, :k], top_ids=report.top_ids[:, :k]
        )
        return jax.tree.map(lambda a: a.reshape(*ids.shape, *a.shape[1:]), report)

    def _report(self, h, ids, k: int, embedding) -> TokenReport:
        return folded_report(self, h, ids, k, embedding)

    def _log_partition(self, norm: Any) -> Array | None:
        """lse of the one softmax that the distribution is; None where it is not one."""
        return None

    # --- walking over blocks -----------------------------------------------------------------------------------

    def _rows(self, h):
        """h as [tokens, d_model]."""
        if not h.shape or h.shape[-1] != self.d_model:
            raise ValueError(
                f"h is {h.shape}; it must be [..., {self.d_model}], the width of the head"
            )
        if not jnp.issubdtype(h.dtype, jnp.floating):
            raise TypeError(f"h is {h.dtype}; hidden states must be floating-point numbers")
        return h.reshape(-1, self.d_model)

    def _flatten(self, h, targets, where):
        if h.shape[-1] != self.d_model or h.shape[:-1] != targets.shape:
            raise ValueError(
                f"h is {h.shape} and targets {targets.shape}; they must be [..., {self.d_model}] and [...]"
            )
        if not jnp.issubdtype(targets.dtype, jnp.integer):
            raise TypeError(f"targets are {targets.dtype}; they must be integer token ids")
        counted = jnp.ones(targets.shape, bool) if where is None else where
        if counted.shape != targets.shape or counted.dtype != jnp.bool_:
            raise ValueError(
                f"where is {counted.dtype}{counted.shape}; it must be bool{targets.shape}, like targets"
            )
        counted, rows = counted.reshape(-1), self._rows(h)
        # Uncounted states are replaced before anything is computed: 0 · NaN would be NaN, in the gradient too.
        flat = jnp.where(counted[:, None], rows, 0)
        ids = jnp.where(counted, targets.reshape(-1), 0)
        return flat, ids, counted

    def _sharded(self, embedding) -> list[Array]:
        """The arrays of the head and of what it ties to that are sharded over the vocabulary."""
        leaves = jax.tree.leaves((self, embedding if self.ties_to != "nothing" else None))
        return [leaf for leaf in leaves if is_sharded(leaf)]

    def _block_rows(self, tokens: int, segment: Segment) -> int:
        return self.block_rows or max((2 << 20) // max(tokens, 1), 128)

    def _blocks(self, tokens: int, segment: Segment, sharded) -> list[tuple[int, int]]:
        """(start, size) of the blocks of a segment, the last one smaller where it does not divide.

        Where rows are sharded, those of this shard, padding included: on which shard it lies is not known here.
        """
        length = segment.rows // shard_count(*sharded) if sharded else segment.size
        size = min(self._block_rows(tokens, segment), length)
        return [(i, min(size, length - i)) for i in range(0, length, size)]

    def _total(self, h, norm, embedding, zero, add):
        """`_fold` of a sum, over the rows of all shards."""
        own = self._fold(h, norm, embedding, zero, add)
        return sum_shards(own, *self._sharded(embedding))

    def _fold(self, h, norm, embedding, carry, add):
        """add(…add(carry, log_probs, ids)…, log_probs, ids) over all blocks of all segments, one block at a time."""
        sharded = self._sharded(embedding)
        carry = jax.tree.map(lambda x: vary_like(x, h, *jax.tree.leaves(norm), *sharded), carry)
        for segment in self.segments():
            blocks = self._blocks(h.shape[0], segment, sharded)
            size, (last, rest) = blocks[0][1], blocks[-1]
            whole = len(blocks) - (rest < size)
            step = self._fold_step(h, norm, embedding, segment, size, add)
            starts = jnp.arange(whole, dtype=jnp.int32) * size
            carry, _ = jax.lax.scan(step, carry, starts)
            if rest < size:
                step = self._fold_step(h, norm, embedding, segment, rest, add)
                carry, _ = step(carry, jnp.int32(last))
        return carry

    def _fold_step(self, h, norm, embedding, segment: Segment, size: int, add):
        """The body of a scan over the starts of blocks; a block is made again in the backward pass."""

        @jax.checkpoint
        def step(carry, start):
            block, ids = self.log_prob_block(h, norm, segment, start, size, embedding)
            return add(carry, block, ids), None

        return step
