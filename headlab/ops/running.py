"""What is known of each token's softmax after some rows, and how that of two runs of rows is joined.

The running maximum m, s = Σ exp(t − m) and t_target − m are combined as nll = log s − (t_target − m): two large numbers
are never subtracted afterwards, so equal logits of any size still give the logarithm of their count.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array

from headlab.ops.linear_logits import accumulator
from headlab.ops.shards import VOCAB, is_sharded
from headlab.ops.varying import vary_like


class Spec(Protocol):
    """What makes logits out of states and rows; hashable, static under `jit`.

    States `h` are a pytree of arrays with a leading axis of tokens, `rows` one with a leading axis of vocabulary rows;
    all arrays of logits have the shape [rows, tokens], float32 at least.
    """

    @property
    def vocab_size(self) -> int:
        """Real rows, of all shards together; those after them are padding."""

    @property
    def token_block(self) -> int | None:
        """Tokens of a block; None: chosen by size."""

    @property
    def vocab_block(self) -> int | None:
        """Rows of a block; None: chosen by size."""

    @property
    def sum_blocks(self) -> int | None:
        """K: sums over the vocabulary follow a balanced binary tree over K blocks of rows; None: the fastest order."""

    def products(self, h: Any, rows: Any) -> Any:
        """What the logits and their gradient are made of: a pytree of [rows, tokens, ...] arrays."""

    def logits(self, z: Any) -> Array:
        """The logits [rows, tokens] of `products`."""

    def pull(self, h: Any, rows: Any, z: Any, dlogits: Array) -> tuple[Any, Any]:
        """(dh, drows), like h and rows but float32 at least, for a gradient in the logits."""


class Statistics(NamedTuple):
    """Numbers a token, all [tokens], float32 at least, in nats."""

    nll: Array  # −log p(target); NaN, gradient too, where the target is outside [0, vocab_size)
    max: Array  # the largest logit; a constant to differentiation
    log_sum: Array  # log Σ exp(logits − max); lse = max + log_sum, with lse's gradient
    uniform_nll: Array  # −(1/V) Σ_v log p(v): the cross-entropy against the uniform distribution


class Running(NamedTuple):
    """What is known of each token's logits after some rows, all [tokens]."""

    max: Array
    sum_exp: Array  # Σ exp(t − max)
    target: Array  # t_target, 0 until its row was seen
    centred: Array  # Σ (t − max) over real rows


def start(h: Any, rows: Any) -> Running:
    """Before any row."""
    first = jax.tree.leaves(h)[0]
    zero = jnp.zeros(first.shape[0], accumulator(first.dtype))
    like = jax.tree.leaves((h, rows))
    return Running(*(vary_like(x, *like) for x in (zero - jnp.inf, zero, zero, zero)))


def advance(
    running: Running, logits: Array, seen: Any, first: Any, targets: Array, spec: Spec
) -> Running:
    """Takes the logits of the rows from number `first` on into the statistics; padded rows count for nothing.

    `seen` is how many real rows they hold already.
    """
    ids = first + jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    real = ids < spec.vocab_size
    shown = jnp.where(real, logits, -jnp.inf)
    new_max = jnp.maximum(running.max, jnp.max(shown, axis=0))
    # A block (or all so far) may hold padding only: its maximum is −inf, and 0 is subtracted in its place.
    old, new = finite(running.max), finite(new_max)
    count = jnp.asarray(seen).astype(logits.dtype)
    return Running(
        new_max,
        # exp(−inf − new) = 0 where nothing was seen; exp(0 − new) would overflow when all logits are very negative.
        running.sum_exp * jnp.exp(running.max - new) + jnp.sum(jnp.exp(shown - new), axis=0),
        running.target + jnp.sum(jnp.where(ids == targets, logits, 0), axis=0),
        running.centred + count * (old - new) + jnp.sum(jnp.where(real, logits - new, 0), axis=0),
    )


def real_rows(first: Any, length: int, spec: Spec) -> Any:
    """How many of the rows `first` … `first + length − 1` of all shards are real."""
    if isinstance(first, int):
        return min(max(spec.vocab_size - first, 0), length)
    return jnp.clip(spec.vocab_size - first, 0, length)


def join(a: Running, b: Running, count_a: Any, count_b: Any) -> Running:
    """The statistics of the rows of both, of which so many are real."""
    largest = jnp.maximum(a.max, b.max)
    new = finite(largest)
    return Running(
        largest,
        a.sum_exp * jnp.exp(a.max - new) + b.sum_exp * jnp.exp(b.max - new),
        a.target + b.target,
        (a.centred + count_a * (finite(a.max) - new))
        + (b.centred + count_b * (finite(b.max) - new)),
    )


def join_shards(running: Running, count: Any, *rows: Array) -> Running:
    """The statistics of the rows of all shards, equal on all: one maximum and one sum cross the mesh axis.

    `count` is how many real rows this shard has, `rows` what is sharded.
    """
    if not is_sharded(*rows):
        return running
    largest = jax.lax.pmax(running.max, VOCAB)
    new = finite(largest)
    shift = jnp.asarray(count).astype(new.dtype) * (finite(running.max) - new)
    sums = jax.lax.psum(
        jnp.stack(
            [running.sum_exp * jnp.exp(running.max - new), running.target, running.centred + shift]
        ),
        VOCAB,
    )
    return Running(largest, *sums)


def finite(x: Array) -> Array:
    """x, 0 where it is −inf: the largest of no logits."""
    return jnp.where(jnp.isneginf(x), 0, x)


def finish(running: Running, targets: Array, spec: Spec) -> Statistics:
    """The statistics of tokens whose rows have all been seen."""
    shift = finite(running.max)
    log_sum = jnp.log(running.sum_exp)
    nll = jnp.where(known(targets, spec), log_sum - (running.target - shift), jnp.nan)
    return Statistics(nll, shift, log_sum, log_sum - running.centred / spec.vocab_size)


def dlogits_of(
    logits: Array, first: Any, targets: Array, stats: Statistics, g: Statistics, spec: Spec
) -> Array:
    """The gradient in the logits of rows from `first` on of the statistics weighted by the cotangents `g`.

    (g_nll + g_log_sum + g_uniform)·p_v − g_nll·[v = target] − g_uniform/V, zero in padded rows.
    """
    ids = first + jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    share = g.nll + g.log_sum + g.uniform_nll
    dlogits = share * jnp.exp((logits - stats.max) - stats.log_sum)
    dlogits = dlogits - jnp.where(ids == targets, g.nll, 0)
    dlogits = dlogits - g.uniform_nll / spec.vocab_size
    return jnp.where(ids < spec.vocab_size, dlogits, 0)


def known(targets: Array, spec: Spec) -> Array:
    """Whether each target is the number of a real row."""
    return (targets >= 0) & (targets < spec.vocab_size)


def or_nan(g: Array, targets: Array, spec: Spec) -> Array:
    """A cotangent of nll, NaN where nll is NaN for its target and somebody counts it."""
    return jnp.where(known(targets, spec) | (g == 0), g, jnp.nan)
