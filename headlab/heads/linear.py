"""Linear softmax heads: `tied` to the input embedding table, or `untied` with a matrix of its own.

logits = map(h · weightᵀ + bias), map(z) = c·tanh(logit_scale·z / c) with a soft cap c, else logit_scale·z. Both heads
use the same convention, so that a comparison of the two compares the matrix alone. Tying: Press & Wolf 2017, Inan
et al. 2017; the soft cap: Gemma 2 (Google DeepMind 2024).
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from headlab.costs import HeadCost, Mode, linear_head_cost
from headlab.embeddings import init_rows, padded_size
from headlab.heads.base import Head, Loss, Segment
from headlab.heads.blocks import cut_rows, numbered
from headlab.ops import (
    LinearSpec,
    LogitMap,
    TokenReport,
    block_logits,
    linear_loss,
    linear_statistics,
    softmax_report,
)
from headlab.ops.shards import UNMARKED, all_rows_shape, sum_shards, take_rows


class Normaliser(NamedTuple):
    """log p(v) = (t_v − max) − log_sum, with t the logits of the context."""

    context: jax.Array  # what rows are multiplied by, [tokens, width]
    max: jax.Array  # [tokens]
    log_sum: jax.Array  # [tokens]


def tied_weight(embedding: Any, shape: tuple[int, int], vocab_size: int) -> jax.Array:
    """The table's rows; ValueError where there is no table, its shape is another, or it is of another vocabulary."""
    if embedding is None:
        raise ValueError("a tied head needs the model's input embedding: pass embedding=")
    weight = embedding.weight[...]
    if all_rows_shape(weight) != shape or embedding.vocab_size != vocab_size:
        raise ValueError(
            f"the embedding table is {all_rows_shape(weight)} of {embedding.vocab_size} tokens; a tied head of "
            f"{vocab_size} tokens needs {shape}{UNMARKED}"
        )
    return weight


def own_logits(spec: Any, h: Any, rows: Any, numbers: jax.Array) -> jax.Array:
    """The logit of each token's own row, given by its number among the rows of all shards: [tokens], equal on all."""
    taken, mine = take_rows(rows, numbers)

    def one(h, row):
        h, row = (jax.tree.map(lambda a: a[None], tree) for tree in (h, row))
        return spec.logits(spec.products(h, row))[0, 0]

    return sum_shards(jnp.where(mine, jax.vmap(one)(h, taken), 0), *jax.tree.leaves(rows))


def linear_reason(spec: LinearSpec, width: str, *, biased: bool) -> str:
    """Why the rank of a softmax over contexts of this width is bounded, or with its map of logits isn't."""
    if spec.logit_map.softcap is not None:
        return (
            "a soft cap bends every logit by itself, so that logits leave the span of the contexts"
        )
    if spec.logit_map.sigsoftmax:
        return "sigsoftmax adds log σ(z) to every logit z, which leaves the span of the contexts (Kanai et al. 2018)"
    return (
        f"logits are linear in a context of {width}, the normaliser adds one dimension"
        f"{' and the bias another' if biased else ''} (Yang et al. 2018)"
    )


class LinearHead(Head):
    """What tied and untied heads share; a subclass says where the weight comes from."""

    def __init__(
        self,
        *,
        vocab_size: int,
        d_model: int,
        vocab_multiple: int = 1,
        bias: bool = False,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        logits_dtype: Literal["float32", "bfloat16"] = "float32",
    ):
        """
        Args:
            vocab_size: real tokens, ≥ 2. d_model: width of h, ≥ 1.
            vocab_multiple: rows are padded to a multiple of this; padding never gets probability or gradient.
            bias: adds a learned bias a token, zero at first.
            softcap: c in c·tanh(z/c), > 0; None for no cap.
            logit_scale: constant factor of the product, ≠ 0 and finite.
            logits_dtype: what products are rounded to. Softmax statistics are float32 in either case; bfloat16 halves
                the memory traffic of logits and quantises the loss to about 2⁻⁸ of a logit.

        Raises:
            ValueError: naming the value and the range.
        """
        if vocab_size < 2:
            raise ValueError(f"vocab_size is {vocab_size}; a distribution needs at least 2 tokens")
        if d_model < 1:
            raise ValueError(f"d_model is {d_model}; it must be at least 1")
        if vocab_multiple < 1:
            raise ValueError(f"vocab_multiple is {vocab_multiple}; it must be at least 1")
        if softcap is not None and not 0 < softcap < float("inf"):
            raise ValueError(f"softcap is {softcap}; it must be positive and finite, or None")
        if logit_scale == 0 or not abs(logit_scale) < float("inf"):
            raise ValueError(f"logit_scale is {logit_scale}; it must be finite and not 0")
        if logits_dtype not in ("float32", "bfloat16"):
            raise ValueError(
                f"logits_dtype is {logits_dtype!r}; it must be 'float32' or 'bfloat16'"
            )
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.rows = padded_size(vocab_size, vocab_multiple)
        self.spec = LinearSpec(vocab_size, LogitMap(logit_scale, softcap), logits_dtype)
        self.bias = nnx.Param(jnp.zeros(self.rows)) if bias else None

    def _weight(self, embedding) -> jax.Array:
        raise NotImplementedError

    def _arrays(self, embedding):
        weight = self._weight(embedding)
        if all_rows_shape(weight)[0] != self.rows:
            raise ValueError(
                f"the weight has {all_rows_shape(weight)[0]} rows; the head has {self.rows}{UNMARKED}"
            )
        return weight, None if self.bias is None else self.bias[...]

    def sum_in_blocks(self, sum_blocks: int | None) -> None:
        self.spec = self.spec._replace(sum_blocks=sum_blocks)

    @property
    def sum_blocks(self) -> int | None:
        return self.spec.sum_blocks

    def _context(self, h) -> jax.Array:
        """What the rows of the weight are multiplied by: h, or what a subclass makes of it."""
        return h

    def segments(self) -> tuple[Segment, ...]:
        return (Segment("vocabulary", self.vocab_size, self.rows),)

    def normalise(self, h, embedding) -> Normaliser:
        nobody = jnp.zeros(h.shape[0], jnp.int32)  # only the normaliser is read, not the nll
        weight, bias = self._arrays(embedding)
        context = self._context(h)
        statistics = linear_statistics(context, weight, bias, nobody, self.spec)
        return Normaliser(context, statistics.max, statistics.log_sum)

    def log_prob_block(self, h, norm, segment, start, size, embedding):
        weight, bias = self._arrays(embedding)
        rows, own_bias = cut_rows((weight, bias), start, size)
        logits = block_logits(norm.context, rows, own_bias, self.spec)
        log_probs = (logits - norm.max[:, None]) - norm.log_sum[:, None]
        return numbered(log_probs, start, segment.size, weight)

    def log_prob_at(self, h, norm, ids, embedding):
        known = (ids >= 0) & (ids < self.vocab_size)
        rows = self._arrays(embedding)
        logits = own_logits(self.spec, norm.context, rows, jnp.where(known, ids, 0))
        return jnp.where(known, (logits - norm.max) - norm.log_sum, jnp.nan)

    def z_penalty(self, norm):
        return (norm.max + norm.log_sum) ** 2

    def _nll(self, h, targets, embedding):
        weight, bias = self._arrays(embedding)
        return linear_statistics(self._context(h), weight, bias, targets, self.spec).nll

    def _report(self, h, ids, k, embedding) -> TokenReport:
        context, rows = self._context(h), self._arrays(embedding)
        known = (ids >= 0) & (ids < self.vocab_size)
        own = own_logits(self.spec, context, rows, jnp.where(known, ids, 0))
        return softmax_report(context, rows, ids, own, k, self.spec)

    def _log_partition(self, norm):
        return norm.max + norm.log_sum

    def _loss(self, h, targets, where, embedding, z_loss_weight, label_smoothing) -> Loss:
        weight, bias = self._arrays(embedding)
        sums = linear_loss(
            self._context(h),
            weight,
            bias,
            targets,
            where,
            self.spec,
            z_loss_weight=z_loss_weight,
            label_smoothing=label_smoothing,
        )
        return Loss(*sums, {})

    def rank_bound(self) -> int | None:
        """d + 1, d + 2 with a bias (Yang et al. 2017); a soft cap is not linear and promises nothing."""
        if self.spec.logit_map.softcap is not None:
            return None
        return min(self.vocab_size, self.d_model + 1 + (self.bias is not None))

    def rank_reason(self) -> str:
        return linear_reason(self.spec, f"d_model = {self.d_model}", biased=self.bias is not None)

    def output_matrix(self, embedding=None):
        weight, bias = self._arrays(embedding)
        return weight[: self.vocab_size], None if bias is None else bias[: self.vocab_size]

    def _own_matrix(self) -> int:
        raise NotImplementedError

    def cost(self, mode: Mode, token_counts=None) -> HeadCost:
        own = self._own_matrix() + (self.vocab_size if self.bias is not None else 0)
        return linear_head_cost(
            mode, vocab_size=self.vocab_size, d_model=self.d_model, own_parameters=own
        )


class Tied(LinearHead):
    """The output matrix is the input embedding table, which the model passes in: one owner, one gradient."""

    ties_to = "table"

    def __init__(
        self,
        *,
        vocab_size: int,
        d_model: int,
        rngs: nnx.Rngs,
        vocab_multiple: int = 1,
        init_scale: float = 0.25,
        bias: bool = False,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        logits_dtype: Literal["float32", "bfloat16"] = "float32",
    ):
        """See `LinearHead`; `rngs` and `init_scale` are the table's affair and change nothing here."""
        super().__init__(
            vocab_size=vocab_size,
            d_model=d_model,
            vocab_multiple=vocab_multiple,
            bias=bias,
            softcap=softcap,
            logit_scale=logit_scale,
            logits_dtype=logits_dtype,
        )

    def _weight(self, embedding) -> jax.Array:
        return tied_weight(embedding, (self.rows, self.d_model), self.vocab_size)

    def _own_matrix(self) -> int:
        return 0


class Untied(LinearHead):
    """The output matrix is the head's own, `[padded_vocab_size, d_model]`."""

    def __init__(
        self,
        *,
        vocab_size: int,
        d_model: int,
        rngs: nnx.Rngs,
        vocab_multiple: int = 1,
        init_scale: float = 0.25,
        bias: bool = False,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        logits_dtype: Literal["float32", "bfloat16"] = "float32",
    ):
        """See `LinearHead`; rows start normal with standard deviation `init_scale / √d_model`."""
        super().__init__(
            vocab_size=vocab_size,
            d_model=d_model,
            vocab_multiple=vocab_multiple,
            bias=bias,
            softcap=softcap,
            logit_scale=logit_scale,
            logits_dtype=logits_dtype,
        )
        self.weight = nnx.Param(
            init_rows(rngs.params(), vocab_size, self.rows, d_model, init_scale)
        )

    def _weight(self, embedding) -> jax.Array:
        return self.weight[...]

    def _own_matrix(self) -> int:
        return self.vocab_size * self.d_model
