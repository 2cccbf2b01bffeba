"""Walking over the tokens of each cluster in blocks whose number depends on the data.

Tokens are sorted by cluster; a last block may reach beyond its cluster, and what it finds there is masked.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from headlab.ops import softmax_blocks as blocks
from headlab.ops.linear_logits import LinearSpec, LogitMap, accumulator
from headlab.ops.varying import vary_like

# Half a block of each cluster's tokens is computed for nobody, on average; larger ones are multiplied faster.
_TOKEN_BLOCK = {"cpu": 64, "gpu": 256, "tpu": 256}
_BLOCK_LOGITS = {"cpu": 1 << 19, "gpu": 32 << 20, "tpu": 16 << 20}


class Cluster(NamedTuple):
    """One cluster's arrays: logits are map((h · kernel) · weightᵀ)."""

    kernel: Float[Array, "d_model width"]
    weight: Float[Array, "rows width"]


class ClusterSpec(NamedTuple):
    """What the clusters need beside their arrays; static under `jit`."""

    sizes: tuple[int, ...]  # real rows of each cluster; those after them are padding
    logit_map: LogitMap = LogitMap()
    logits_dtype: str = "float32"  # see LinearSpec
    token_block: int | None = None  # None: chosen by device
    vocab_block: int | None = None  # None: chosen by size
    sum_blocks: int | None = None  # K; see `headlab.ops.softmax_tree`

    def token_block_of(self, tokens: int) -> int:
        """Tokens of a block among so many."""
        return max(1, min(self.token_block or blocks.setting(_TOKEN_BLOCK), tokens))

    def linear(self, cluster: int, tokens: int) -> LinearSpec:
        """The softmax of one cluster, with the blocks in which it is walked for so many tokens."""
        token_block = self.token_block_of(tokens)
        fitting = max(blocks.setting(_BLOCK_LOGITS) // token_block, 1024)
        vocab_block = self.vocab_block or fitting
        size = self.sizes[cluster]
        return LinearSpec(
            size, self.logit_map, self.logits_dtype, token_block, vocab_block, self.sum_blocks
        )


# --- tokens by cluster -------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """Where tokens stand when sorted by cluster: those of no cluster first."""

    order: Array  # [tokens + padding]: the token at each place
    place: Array  # [tokens]: the place of each token
    starts: Array  # [clusters]: the first place of each cluster
    counts: Array  # [clusters]: its tokens


def _plan(own, n_clusters: int, padding: int) -> Plan:
    key = jnp.where((own >= 0) & (own < n_clusters), own, -1).astype(jnp.int32)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    place = jnp.argsort(order).astype(jnp.int32)
    counts = jnp.sum(key[:, None] == jnp.arange(n_clusters), axis=0, dtype=jnp.int32)
    ends = own.shape[0] - jnp.sum(counts, dtype=jnp.int32) + jnp.cumsum(counts, dtype=jnp.int32)
    return Plan(jnp.pad(order, (0, padding)), place, ends - counts, counts)


class Block(NamedTuple):
    """A block of the tokens of one cluster."""

    place: Array  # where its first token stands when tokens are sorted by cluster
    tokens: Array  # [block]: which tokens
    real: Array  # [block]: whether they are of this cluster
    rows: Array  # [block]: their rows in it, 0 where not real
    states: Array  # [block, d_model], 0 where not real
    latent: Array  # [block, width]: states · kernel
    cluster: Cluster
    spec: LinearSpec


def walk(h, clusters, own, rows, spec: ClusterSpec, placed, carries, one):
    """placed and carries after `one(block, carry) -> (results, carry)` for every block of tokens of every cluster.

    Each cluster has a carry of its own. Results, one a token, are put in `placed` at the places of the tokens; in the
    end they are given in the order of the tokens, those of no cluster as they were.
    """
    tokens = h.shape[0]
    size = spec.token_block_of(tokens)
    plan = _plan(own, len(clusters), size)
    within = jnp.arange(size, dtype=jnp.int32)
    # A last block reaches beyond its cluster, into places that later clusters write over, or into the padding.
    placed = jax.tree.map(lambda a: jnp.pad(a, ((0, size), *((0, 0),) * (a.ndim - 1))), placed)
    done = []
    for i, (cluster, carry) in enumerate(zip(clusters, carries, strict=True)):
        start, count, linear = plan.starts[i], plan.counts[i], spec.linear(i, tokens)

        def body(step, state, start=start, count=count, cluster=cluster, linear=linear):
            placed, carry = state
            offset = step * size
            index = jax.lax.dynamic_slice_in_dim(plan.order, start + offset, size)
            real = offset + within < count
            states = jnp.where(real[:, None], jnp.take(h, index, axis=0), 0)
            own_rows = jnp.where(real, jnp.take(rows, index), 0)
            latent = product(states, cluster.kernel.astype(h.dtype), 1, 0).astype(h.dtype)
            block = Block(start + offset, index, real, own_rows, states, latent, cluster, linear)
            results, carry = one(block, carry)
            return put_rows(placed, results, start + offset), carry

        trips = (count + size - 1) // size
        placed, carry = jax.lax.fori_loop(jnp.int32(0), trips, body, (placed, carry))
        done.append(carry)
    return jax.tree.map(lambda a: jnp.take(a, plan.place, axis=0), placed), tuple(done)


def put_rows(placed, results, start):
    """`placed` with the results, of a row a token, from row `start` on."""
    return jax.tree.map(
        lambda a, new: jax.lax.dynamic_update_slice_in_dim(a, new.astype(a.dtype), start, axis=0),
        placed,
        results,
    )


def product(a, b, contract_a: int, contract_b: int):
    """a · b over one axis of each, accumulated in float32 at least."""
    contract = (((contract_a,), (contract_b,)), ((), ()))
    return jax.lax.dot_general(a, b, contract, preferred_element_type=accumulator(a.dtype))


def zeros(shape, like) -> Array:
    """Zeros, float32 at least, that vary over the mesh axes of the arrays in `like`; the first says the dtype."""
    leaves = jax.tree.leaves(like)
    return vary_like(jnp.zeros(shape, accumulator(leaves[0].dtype)), *leaves)
