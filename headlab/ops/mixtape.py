"""The logits of mixtape: products of several contexts with a row, mixed by gates of the row's own (Yang et al. 2019).

With contexts c_k, a row's weight w, gate vector v and gate biases β:

    z = Σ_k π_k · (c_k·w),   π from γ_j = σ(v·g_j + s_j + β_j),   t = map(z + b).

The K priors π are the leaves of a binary tree of K − 1 sigmoids; with K = 4: γ₀γ₁, γ₀(1−γ₁), (1−γ₀)γ₂, (1−γ₀)(1−γ₂).
They sum to 1 without a normaliser.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from headlab.ops.linear_logits import LinearSpec, LogitMap
from headlab.ops.running import Statistics
from headlab.ops.shards import shard_count
from headlab.ops.softmax_blocks import block_sizes, softmax_statistics


class MixtapeStates(NamedTuple):
    """What of the hidden states a mixtape needs."""

    contexts: Array  # [tokens, K, d_latent]: c_k
    gates: Array  # [tokens, K−1, d_gate]: g_j
    shared: Array  # [tokens, K−1]: s_j, float32 at least


class MixtapeRows(NamedTuple):
    """A row a token."""

    weight: Array  # [rows, d_latent]: w
    gate: Array  # [rows, d_gate]: v
    gate_bias: Array  # [rows, K−1]: β
    bias: Array | None  # [rows]: b


class MixtapeProducts(NamedTuple):
    """What logits are made of, each [rows, tokens]."""

    leaves: list[Array]  # c_k·w, K of them
    gates: list[Array]  # v·g_j + s_j + β_j, K − 1 of them
    bias: Array | None  # [rows, 1]


class MixtapeSpec(NamedTuple):
    """A `Spec` of rows with gates of their own; `linear` says the sizes, the map and the rounding of products."""

    linear: LinearSpec

    @property
    def vocab_size(self) -> int:
        """Real rows."""
        return self.linear.vocab_size

    @property
    def token_block(self) -> int | None:
        """Tokens of a block."""
        return self.linear.token_block

    @property
    def vocab_block(self) -> int | None:
        """Rows of a block."""
        return self.linear.vocab_block

    @property
    def sum_blocks(self) -> int | None:
        """The number of blocks of an order of sums."""
        return self.linear.sum_blocks

    def products(self, h: MixtapeStates, rows: MixtapeRows) -> MixtapeProducts:
        """Products of every context, pre-activations of every gate, and the bias; see `MixtapeProducts`."""
        leaves = [self._leaf.products(c, (rows.weight, None)) for c in _columns(h.contexts)]
        gates = [
            self._gate.products(g, (rows.gate, rows.gate_bias[:, j])) + h.shared[:, j]
            for j, g in enumerate(_columns(h.gates))
        ]
        bias = None if rows.bias is None else rows.bias.astype(leaves[0].dtype)[:, None]
        return MixtapeProducts(leaves, gates, bias)

    def logits(self, z: MixtapeProducts) -> Array:
        """t = map(Σ_k π_k · (c_k·w) + b), [rows, tokens]."""
        return self.linear.logit_map(self._mixed(z))

    def _mixed(self, z: MixtapeProducts) -> Array:
        mixed = mix(z.leaves, [jax.nn.sigmoid(gate) for gate in z.gates])
        return mixed if z.bias is None else mixed + z.bias

    def pull(
        self, h: MixtapeStates, rows: MixtapeRows, z: MixtapeProducts, dlogits: Array
    ) -> tuple[MixtapeStates, MixtapeRows]:
        """(dh, drows) for the gradient in the logits; float32 at least."""
        dmixed = dlogits * self.linear.logit_map.derivative(self._mixed(z))
        open_ = [jax.nn.sigmoid(gate) for gate in z.gates]
        dleaves, dopen = _unmix(z.leaves, open_, dmixed)
        dgates = [d * g * (1 - g) for d, g in zip(dopen, open_, strict=True)]
        pulled = [
            self._leaf.pull(c, (rows.weight, None), p, d)
            for c, p, d in zip(_columns(h.contexts), z.leaves, dleaves, strict=True)
        ]
        gated = [
            self._gate.pull(g, (rows.gate, rows.gate_bias[:, j]), p, d)
            for j, (g, p, d) in enumerate(zip(_columns(h.gates), z.gates, dgates, strict=True))
        ]
        dstates = MixtapeStates(
            jnp.stack([dc for dc, _ in pulled], axis=1),
            jnp.stack([dg for dg, _ in gated], axis=1),
            jnp.stack([jnp.sum(d, axis=0) for d in dgates], axis=1),
        )
        drows = MixtapeRows(
            functools.reduce(jnp.add, [dweight for _, (dweight, _) in pulled]),
            functools.reduce(jnp.add, [dgate for _, (dgate, _) in gated]),
            jnp.stack([jnp.sum(d, axis=1) for d in dgates], axis=1),
            None if rows.bias is None else jnp.sum(dmixed, axis=1),
        )
        return dstates, drows

    @property
    def _leaf(self) -> LinearSpec:
        return self.linear._replace(logit_map=LogitMap())

    @property
    def _gate(self) -> LinearSpec:
        return LinearSpec(self.vocab_size)


def mix(leaves: Sequence[Array], gates: Sequence[Array]) -> Array:
    """Σ_k π_k · leaf_k, where π are the leaves of a binary tree of sigmoids, K a power of two.

    Node j has the gate γ_j; its value is γ_j times that of node 2j + 1 and 1 − γ_j times that of node 2j + 2, and the
    leaves follow the K − 1 nodes in this numbering.
    """
    return _nodes(leaves, gates)[0]


def _nodes(leaves: Sequence[Array], gates: Sequence[Array]) -> list[Array]:
    values: list[Any] = [None] * len(gates) + list(leaves)
    for j in reversed(range(len(gates))):
        left, right = values[2 * j + 1 : 2 * j + 3]
        values[j] = right + gates[j] * (left - right)
    return values


def _unmix(
    leaves: Sequence[Array], gates: Sequence[Array], dmixed: Array
) -> tuple[list[Array], list[Array]]:
    """The gradients in the leaves and in the gates for that in `mix`."""
    values = _nodes(leaves, gates)
    d: list[Any] = [dmixed] + [None] * (len(values) - 1)
    dgates = []
    for j, gate in enumerate(gates):
        left, right = values[2 * j + 1 : 2 * j + 3]
        dgates.append(d[j] * (left - right))
        d[2 * j + 1] = d[j] * gate
        d[2 * j + 2] = d[j] * (1 - gate)
    return d[len(gates) :], dgates


def mixtape_statistics(
    h: MixtapeStates, rows: MixtapeRows, targets: Int[Array, "tokens"], spec: MixtapeSpec
) -> Statistics:
    """`softmax_statistics` of a mixtape's logits, in blocks that are smaller as more is held for each logit."""
    experts = h.contexts.shape[1]
    # With an order of sums, blocks must not depend on the number of shards.
    count = rows.weight.shape[0] * (shard_count(rows.weight) if spec.sum_blocks else 1)
    tokens, size = block_sizes(h.contexts.shape[0], count, spec, rows.weight.shape[1])
    if spec.token_block is None:
        tokens = max(tokens // (2 * experts - 1), min(tokens, 8))
    linear = spec.linear._replace(token_block=tokens, vocab_block=size)
    return softmax_statistics(h, rows, targets, MixtapeSpec(linear))


class Part(NamedTuple):
    """Some of the rows that a softmax normalises together."""

    statistics: Statistics  # over these rows alone
    size: int  # real rows
    holds: Bool[Array, "tokens"]  # whether the target is one of these rows


def join_statistics(parts: Sequence[Part]) -> Statistics:
    """The statistics of all parts' rows under one normaliser.

    With the share of a part, log s_i = lse_i − lse, of what all sum to: nll = nll_i − log s_i for the part that holds
    the target, a sum of two numbers that are both ≥ 0, so that nothing cancels.
    """
    statistics = [part.statistics for part in parts]
    largest = functools.reduce(jnp.maximum, [jax.lax.stop_gradient(s.max) for s in statistics])
    # (max_i − max) + log_sum_i, in this order: two large maxima are subtracted before anything small is added
    logs = [(jax.lax.stop_gradient(s.max) - largest) + s.log_sum for s in statistics]
    log_sum = functools.reduce(jnp.logaddexp, logs)
    nll, uniform = jnp.zeros_like(log_sum), jnp.zeros_like(log_sum)
    for part, log in zip(parts, logs, strict=True):
        share = log - log_sum
        nll = jnp.where(part.holds, part.statistics.nll - share, nll)
        uniform = uniform + part.size * (part.statistics.uniform_nll - share)
    return Statistics(nll, largest, log_sum, uniform / sum(part.size for part in parts))


def _columns(array: Float[Array, "tokens n width"]) -> list[Array]:
    return [array[:, i] for i in range(array.shape[1])]
