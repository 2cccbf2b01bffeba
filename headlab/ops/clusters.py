"""The softmaxes of an adaptive softmax; that of each tail computed for its own tokens alone (Grave et al. 2017).

Tokens are sorted by cluster, and each cluster's are walked in blocks whose number depends on the data (a loop inside a
custom VJP), so that under `jit` too the work is proportional to the tokens of each cluster: none is dropped, and no
cluster is computed for a token of another but for the rest of its last block. `[tokens, rows]` is never held.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from headlab.ops import softmax_blocks as blocks
from headlab.ops.linear_logits import LinearSpec, LogitMap, accumulator
from headlab.ops.token_blocks import add_rows, fold_slices
from headlab.ops.varying import sum_to_like, vary_like


class HeadSpec(LinearSpec):
    """The softmax over a shortlist and the clusters: logits map(h · weightᵀ + bias) + offset, a constant a row.

    Rows are (weight, bias, offset), offset [rows].
    """

    def products(self, h, rows):
        weight, bias, offset = rows
        return super().products(h, (weight, bias)), offset[:, None]

    def logits(self, z):
        product, offset = z
        return super().logits(product) + offset

    def pull(self, h, rows, z, dlogits):
        weight, bias, offset = rows
        dh, drows = super().pull(h, (weight, bias), z[0], dlogits)
        return dh, (*drows, jnp.zeros_like(offset))


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

    def token_block_of(self, tokens: int) -> int:
        """Tokens of a block among so many."""
        return max(1, min(self.token_block or blocks.setting(_TOKEN_BLOCK), tokens))

    def linear(self, cluster: int, tokens: int) -> LinearSpec:
        """The softmax of one cluster, with the blocks in which it is walked for so many tokens."""
        token_block = self.token_block_of(tokens)
        fitting = max(blocks.setting(_BLOCK_LOGITS) // token_block, 1024)
        vocab_block = self.vocab_block or fitting
        size = self.sizes[cluster]
        return LinearSpec(size, self.logit_map, self.logits_dtype, token_block, vocab_block)


class ClusterStatistics(NamedTuple):
    """Numbers a token, [tokens], float32 at least, in nats; 0 for a token of no cluster."""

    nll: Array  # −log p(row) within the token's own cluster
    lse: Array  # log Σ exp(logits) over the rows of its own cluster


class ClusterSums(NamedTuple):
    """Scalars over the tokens of all clusters, float32 at least."""

    objective: Array  # Σ nll + z_loss_weight·lse²; the only differentiable one
    nats: Array  # Σ nll


# Half a block of each cluster's tokens is computed for nobody, on average; larger ones are multiplied faster.
_TOKEN_BLOCK = {"cpu": 64, "gpu": 256, "tpu": 256}
_BLOCK_LOGITS = {"cpu": 1 << 19, "gpu": 32 << 20, "tpu": 16 << 20}


def cluster_statistics(
    h: Float[Array, "tokens d_model"],
    clusters: tuple[Cluster, ...],
    own: Int[Array, "tokens"],
    rows: Int[Array, "tokens"],
    spec: ClusterSpec,
) -> ClusterStatistics:
    """nll and lse of each token in its own cluster; differentiable in h and the clusters by making blocks again.

    Args:
        h: states. The latent h · kernel is rounded to their dtype; softmax statistics are float32 at least.
        own: which of the clusters a token is in; a token with any other number is in none and costs nothing.
        rows: the token's row in its cluster, in [0, size); read for tokens of a cluster alone.

    Reverse-mode derivatives of first order; JAX refuses forward-mode ones, and second ones raise NotImplementedError.
    """
    if not clusters or not h.shape[0]:
        zero = jnp.zeros(h.shape[0], accumulator(h.dtype))
        return ClusterStatistics(zero, zero)
    nll, largest, log_sum = _statistics(h, clusters, own, rows, spec)
    return ClusterStatistics(nll, largest + log_sum)


def cluster_loss(
    h: Float[Array, "tokens d_model"],
    clusters: tuple[Cluster, ...],
    own: Int[Array, "tokens"],
    rows: Int[Array, "tokens"],
    spec: ClusterSpec,
    *,
    z_loss_weight: float = 0.0,
) -> ClusterSums:
    """Σ nll + z_loss_weight·lse² over the tokens of all clusters; arguments as in `cluster_statistics`.

    Only `objective` is differentiable: its gradients are made beside it in the forward pass when one is asked for.
    """
    if not clusters or not h.shape[0]:
        zero = jnp.zeros((), accumulator(h.dtype))
        return ClusterSums(zero, zero)
    objective, nats = _loss(h, clusters, own, rows, spec, z_loss_weight)
    return ClusterSums(objective, jax.lax.stop_gradient(nats))


# --- tokens by cluster -------------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """Where tokens stand when sorted by cluster: those of no cluster first."""

    order: Array  # [tokens + padding]: the token at each place
    place: Array  # [tokens]: the place of each token
    starts: Array  # [clusters]: the first place of each cluster
    counts: Array  # [clusters]: its tokens


def _plan(own, n_clusters: int, padding: int) -> _Plan:
    key = jnp.where((own >= 0) & (own < n_clusters), own, -1).astype(jnp.int32)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    place = jnp.argsort(order).astype(jnp.int32)
    counts = jnp.sum(key[:, None] == jnp.arange(n_clusters), axis=0, dtype=jnp.int32)
    ends = own.shape[0] - jnp.sum(counts, dtype=jnp.int32) + jnp.cumsum(counts, dtype=jnp.int32)
    return _Plan(jnp.pad(order, (0, padding)), place, ends - counts, counts)


class _Block(NamedTuple):
    """A block of the tokens of one cluster."""

    tokens: Array  # [block]: which tokens
    real: Array  # [block]: whether they are of this cluster
    rows: Array  # [block]: their rows in it, 0 where not real
    states: Array  # [block, d_model], 0 where not real
    latent: Array  # [block, width]: states · kernel
    cluster: Cluster
    spec: LinearSpec


def _walk(h, clusters, own, rows, spec: ClusterSpec, placed, carries, one):
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
            latent = _product(states, cluster.kernel.astype(h.dtype), 1, 0).astype(h.dtype)
            block = _Block(index, real, own_rows, states, latent, cluster, linear)
            results, carry = one(block, carry)
            return _put(placed, results, start + offset), carry

        trips = (count + size - 1) // size
        placed, carry = jax.lax.fori_loop(jnp.int32(0), trips, body, (placed, carry))
        done.append(carry)
    return jax.tree.map(lambda a: jnp.take(a, plan.place, axis=0), placed), tuple(done)


def _put(placed, results, start):
    return jax.tree.map(
        lambda a, new: jax.lax.dynamic_update_slice_in_dim(a, new.astype(a.dtype), start, axis=0),
        placed,
        results,
    )


def _product(a, b, contract_a: int, contract_b: int):
    contract = (((contract_a,), (contract_b,)), ((), ()))
    return jax.lax.dot_general(a, b, contract, preferred_element_type=accumulator(a.dtype))


def _zeros(shape, h, clusters, own):
    zeros = jnp.zeros(shape, accumulator(h.dtype))
    return vary_like(zeros, h, own, *jax.tree.leaves(clusters))


# --- one block of a cluster's tokens -----------------------------------------------------------------------------


def _block_statistics(block: _Block) -> blocks.Statistics:
    rows = (block.cluster.weight, None)
    running = blocks.walk_rows(block.latent, rows, block.rows, block.spec, block.latent.shape[0])
    return blocks.finish(running, block.rows, block.spec)


def _block_gradients(block: _Block, stats, nll, log_sum, sums: Cluster):
    """(dstates, sums + the gradients of the cluster's arrays) for the cotangents of nll and lse, [block] each."""
    spec, latent, (kernel, weight) = block.spec, block.latent, block.cluster
    nll, log_sum = (jnp.where(block.real, g, 0) for g in (nll, log_sum))
    zero = jnp.zeros_like(nll)
    g = blocks.Statistics(nll=nll, max=zero, log_sum=log_sum, uniform_nll=zero)

    def step(carry, start, size):
        dlatent, dweight = carry
        part = blocks.rows_of_block((weight, None), start, size)
        z = spec.products(latent, part)
        dlogits = blocks.dlogits_of(spec.logits(z), start, block.rows, stats, g, spec)
        more, (drows, _) = spec.pull(latent, part, z, dlogits)
        return dlatent + more, add_rows(dweight, drows, start)

    _, vocab_block = blocks.block_sizes(latent.shape[0], weight.shape[0], spec)
    zeros = vary_like(jnp.zeros(latent.shape, accumulator(latent.dtype)), sums.weight)
    dlatent, dweight = fold_slices(step, vocab_block, weight.shape[0], (zeros, sums.weight))
    narrow = dlatent.astype(latent.dtype)
    dkernel = _product(narrow, block.states, 0, 0).T
    dstates = _product(narrow, kernel.astype(latent.dtype), 1, 1)
    return dstates, Cluster(sums.kernel + dkernel, dweight)


# --- numbers a token ---------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _statistics(h, clusters, own, rows, spec):
    """(nll, max, log_sum) of each token in its own cluster."""

    def one(block, carry):
        stats = _block_statistics(block)
        return (stats.nll, stats.max, stats.log_sum), carry

    zero = _zeros(h.shape[0], h, clusters, own)
    placed = (zero, zero, zero)
    return _walk(h, clusters, own, rows, spec, placed, ((),) * len(clusters), one)[0]


def _statistics_forward(h, clusters, own, rows, spec):
    stats = _statistics(h, clusters, own, rows, spec)
    return stats, (h, clusters, own, rows, stats)


def _statistics_backward(spec, residuals, cotangent):
    h, clusters, own, rows, stats = residuals
    dh, dclusters = _once(_gradients, spec, h, clusters, own, rows, stats, cotangent)
    return _narrowed(dh, h), _narrowed(dclusters, clusters), None, None


_statistics.defvjp(_statistics_forward, _statistics_backward)


def _gradients(spec, h, clusters, own, rows, stats, cotangent):
    """(dh, dclusters) of the statistics, every block made again."""

    def one(block, sums):
        (nll, largest, log_sum), (g_nll, _, g_log_sum) = jax.tree.map(
            lambda a: jnp.take(a, block.tokens), (stats, cotangent)
        )
        found = blocks.Statistics(nll, largest, log_sum, jnp.zeros_like(nll))
        return _block_gradients(block, found, g_nll, g_log_sum, sums)

    sums = jax.tree.map(lambda a: _zeros(a.shape, h, clusters, own), clusters)
    return _walk(h, clusters, own, rows, spec, _zeros(h.shape, h, clusters, own), sums, one)


# --- sums for training -------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _loss(h, clusters, own, rows, spec, z_loss_weight):
    nll, largest, log_sum = _statistics(h, clusters, own, rows, spec)
    penalty = z_loss_weight * (largest + log_sum) ** 2 if z_loss_weight else 0
    return jnp.sum(nll + penalty), jnp.sum(nll)


def _loss_forward(h, clusters, own, rows, spec, z_loss_weight):
    made = functools.partial(_loss_and_gradients, z_loss_weight)
    sums, gradients = _once(made, spec, h, clusters, own, rows)
    return sums, (gradients, h, clusters)


def _loss_and_gradients(z_loss_weight, spec, h, clusters, own, rows):
    """((objective, nats), (dh, dclusters))."""

    def one(block, carry):
        objective, nats, sums = carry
        stats = _block_statistics(block)
        lse = stats.max + stats.log_sum
        nll = jnp.where(block.real, stats.nll, 0)
        penalty = z_loss_weight * jnp.where(block.real, lse, 0) ** 2 if z_loss_weight else 0
        g_log_sum = 2 * z_loss_weight * lse
        dstates, sums = _block_gradients(block, stats, jnp.ones_like(nll), g_log_sum, sums)
        return dstates, (objective + jnp.sum(nll + penalty), nats + jnp.sum(nll), sums)

    zero = _zeros((), h, clusters, own)
    sums = jax.tree.map(lambda a: _zeros(a.shape, h, clusters, own), clusters)
    carries = tuple((zero, zero, own_sums) for own_sums in sums)
    placed = _zeros(h.shape, h, clusters, own)
    dh, done = _walk(h, clusters, own, rows, spec, placed, carries, one)
    objective, nats, dclusters = zip(*done, strict=True)
    return (sum(objective), sum(nats)), (dh, dclusters)


def _loss_backward(spec, z_loss_weight, residuals, cotangent):
    gradients, h, clusters = residuals
    g, _ = cotangent  # the pure nats are reported, never differentiated
    dh, dclusters = jax.tree.map(lambda d: g * d, gradients)
    return _narrowed(dh, h), _narrowed(dclusters, clusters), None, None


_loss.defvjp(_loss_forward, _loss_backward)


def _narrowed(gradients: Any, primals: Any) -> Any:
    """Gradients in the dtypes of their primals, summed over the mesh axes that those do not vary over."""
    return jax.tree.map(lambda d, p: sum_to_like(d.astype(p.dtype), p), gradients, primals)


# --- no second derivatives ---------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _once(gradients, spec, *arrays):
    """gradients(spec, *arrays), whose loops cannot be differentiated again."""
    return gradients(spec, *arrays)


def _refuse(gradients, spec, residuals, cotangent):
    raise NotImplementedError(
        "second derivatives of the loss or nll of an adaptive softmax are not implemented, for the length of its loops "
        "depends on the data; differentiate a function of log_probs, which computes every cluster for every token"
    )


_once.defvjp(lambda gradients, spec, *arrays: (gradients(spec, *arrays), ()), _refuse)
