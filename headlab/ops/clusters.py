"""The softmaxes of an adaptive softmax; that of each tail computed for its own tokens alone (Grave et al. 2017).

Tokens are sorted by cluster, and each cluster's are walked in blocks whose number depends on the data (a loop inside a
custom VJP), so that under `jit` too the work is proportional to the tokens of each cluster: none is dropped, and no
cluster is computed for a token of another but for the rest of its last block. `[tokens, rows]` is never held.

Where the rows of clusters are sharded over the mesh axis `vocab`, no collective stands in such a loop: one loop finds
each shard's part of the statistics, a second its gradients, a third what follows from their sums; what is joined is
joined between them.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from headlab.ops import running as run
from headlab.ops import softmax_blocks as blocks
from headlab.ops import softmax_tree as tree
from headlab.ops.cluster_walk import Block, Cluster, ClusterSpec, product, put_rows, walk, zeros
from headlab.ops.linear_logits import LinearSpec, accumulator
from headlab.ops.shards import first_row, shard_count, sum_shards
from headlab.ops.token_blocks import add_rows, fold_slices, rows_of_block
from headlab.ops.varying import narrow_like, vary_like


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


class ClusterStatistics(NamedTuple):
    """Numbers a token, [tokens], float32 at least, in nats; 0 for a token of no cluster."""

    nll: Array  # −log p(row) within the token's own cluster
    lse: Array  # log Σ exp(logits) over the rows of its own cluster


class ClusterSums(NamedTuple):
    """Scalars over the tokens of all clusters, float32 at least."""

    objective: Array  # Σ nll + z_loss_weight·lse²; the only differentiable one
    nats: Array  # Σ nll


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


# --- one block of a cluster's tokens -----------------------------------------------------------------------------


def _block_statistics(block: Block) -> run.Statistics:
    rows = (block.cluster.weight, None)
    running = blocks.walk_rows(block.latent, rows, block.rows, block.spec, block.latent.shape[0])
    return run.finish(running, block.rows, block.spec)


def _latent_gradients(block: Block, stats, nll, log_sum, dweight):
    """(dlatent of this shard's rows, dweight + theirs) for the cotangents of nll and lse, [block] each."""
    spec, latent, weight = block.spec, block.latent, block.cluster.weight
    nll, log_sum = (jnp.where(block.real, g, 0) for g in (nll, log_sum))
    zero = jnp.zeros_like(nll)
    g = run.Statistics(nll=nll, max=zero, log_sum=log_sum, uniform_nll=zero)
    rows = (weight, None)
    if spec.sum_blocks:
        sums = (dweight, None)
        found = tree.shard_gradients(latent, rows, block.rows, stats, g, spec, sums)
        return found[0], found[1][0]
    first = first_row(weight)

    def step(carry, start, size):
        dlatent, dweight = carry
        part = rows_of_block(rows, start, size)
        z = spec.products(latent, part)
        dlogits = run.dlogits_of(spec.logits(z), first + start, block.rows, stats, g, spec)
        more, (drows, _) = spec.pull(latent, part, z, dlogits)
        return dlatent + more, add_rows(dweight, drows, start)

    _, vocab_block = blocks.block_sizes(latent.shape[0], weight.shape[0], spec)
    carry = (vary_like(jnp.zeros(latent.shape, accumulator(latent.dtype)), dweight), dweight)
    return fold_slices(step, vocab_block, weight.shape[0], carry)


def _through_kernel(block: Block, dlatent, dkernel):
    """(dstates, dkernel + the block's) for the gradient in the latent."""
    narrow = dlatent.astype(block.latent.dtype)
    dstates = product(narrow, block.cluster.kernel.astype(narrow.dtype), 1, 1)
    return dstates, dkernel + product(narrow, block.states, 0, 0).T


# --- joined over the shards --------------------------------------------------------------------------------------


def _in_parts(clusters, spec: ClusterSpec) -> bool:
    """Whether statistics and gradients are made in parts that are joined outside the loops."""
    weights = [cluster.weight for cluster in clusters]
    return spec.sum_blocks is not None or shard_count(*weights) > 1


def _joined_statistics(h, clusters, own, rows, spec):
    """(nll, max, log_sum) of each token in its own cluster, from the parts of all shards."""
    weight = clusters[0].weight
    parts = 1
    if spec.sum_blocks:
        parts, _ = tree.blocks_of_shard(weight, spec.sum_blocks)

    def one(block, carry):
        own_rows = (block.cluster.weight, None)
        if spec.sum_blocks:
            found, _ = tree.tree_parts(block.latent, own_rows, block.rows, block.spec)
            return tuple(a.T for a in found[:3]), carry
        size = block.latent.shape[0]
        found = blocks.walk_rows(block.latent, own_rows, block.rows, block.spec, size)
        return tuple(a[:, None] for a in found[:3]), carry

    blank = zeros((h.shape[0], parts), (h, clusters, own))
    placed = (blank, blank, blank)
    found, _ = walk(h, clusters, own, rows, spec, placed, ((),) * len(clusters), one)
    largest, sum_exp, target = (a.T for a in found)
    running = run.Running(largest, sum_exp, target, jnp.zeros_like(target))

    def finish(joined, own):
        inside = (own >= 0) & (own < len(clusters))
        shift = run.finite(joined.max)
        log_sum = jnp.where(inside, jnp.log(joined.sum_exp), 0)
        nll = jnp.where(inside, log_sum - (joined.target - shift), 0)
        return nll, jnp.where(inside, shift, 0), log_sum

    if spec.sum_blocks:
        return tree.join_parts(running, lambda _: 0, weight, finish, own)
    return finish(run.join_shards(jax.tree.map(lambda a: a[0], running), 0, weight), own)


def _joined_gradients(h, clusters, own, rows, spec, stats, cotangent):
    """(dh, dclusters), dh and those of kernels equal on all shards."""

    def first(block, carry):
        dlatents, dweight = carry
        own_stats, nll, log_sum = _of_block(block, stats, cotangent)
        dlatent, dweight = _latent_gradients(block, own_stats, nll, log_sum, dweight)
        return (), (put_rows(dlatents, dlatent, block.place), dweight)

    size = spec.token_block_of(h.shape[0])
    everything = (h, clusters, own, cotangent)
    carries = tuple(
        (
            zeros((h.shape[0] + size, cluster.kernel.shape[1]), everything),
            zeros(cluster.weight.shape, everything),
        )
        for cluster in clusters
    )
    _, done = walk(h, clusters, own, rows, spec, (), carries, first)
    dlatents, dweights = zip(*done, strict=True)
    weight = clusters[0].weight
    add_up = tree.sum_parts if spec.sum_blocks else sum_shards
    dlatents = add_up(dlatents, weight)

    def second(block, carry):
        dlatents, dkernel = carry
        dlatent = jax.lax.dynamic_slice_in_dim(dlatents, block.place, size)
        dlatent = jnp.where(block.real[:, None], dlatent, 0)
        dstates, dkernel = _through_kernel(block, dlatent, dkernel)
        return dstates, (dlatents, dkernel)

    kernels = tuple(cluster.kernel for cluster in clusters)
    like = (h, kernels, own, cotangent)
    carries = tuple(
        (dlatent, zeros(kernel.shape, like))
        for dlatent, kernel in zip(dlatents, kernels, strict=True)
    )
    dh, done = walk(h, clusters, own, rows, spec, zeros(h.shape, like), carries, second)
    return dh, tuple(
        Cluster(dkernel, dweight) for (_, dkernel), dweight in zip(done, dweights, strict=True)
    )


def _of_block(block: Block, stats, cotangent):
    """(statistics, cotangent of nll, cotangent of log_sum) of the block's tokens."""
    (nll, largest, log_sum), (g_nll, _, g_log_sum) = jax.tree.map(
        lambda a: jnp.take(a, block.tokens), (stats, cotangent)
    )
    return run.Statistics(nll, largest, log_sum, jnp.zeros_like(nll)), g_nll, g_log_sum


# --- numbers a token ---------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _statistics(h, clusters, own, rows, spec):
    """(nll, max, log_sum) of each token in its own cluster, equal on all shards."""
    if _in_parts(clusters, spec):
        return _joined_statistics(h, clusters, own, rows, spec)

    def one(block, carry):
        stats = _block_statistics(block)
        return (stats.nll, stats.max, stats.log_sum), carry

    zero = zeros(h.shape[0], (h, clusters, own))
    placed = (zero, zero, zero)
    found, _ = walk(h, clusters, own, rows, spec, placed, ((),) * len(clusters), one)
    return sum_shards(found, clusters[0].weight)  # of one shard


def _statistics_forward(h, clusters, own, rows, spec):
    stats = _statistics(h, clusters, own, rows, spec)
    return stats, (h, clusters, own, rows, stats)


def _statistics_backward(spec, residuals, cotangent):
    h, clusters, own, rows, stats = residuals
    dh, dclusters = _once(_gradients, spec, h, clusters, own, rows, stats, cotangent)
    return narrow_like(dh, h), narrow_like(dclusters, clusters), None, None


_statistics.defvjp(_statistics_forward, _statistics_backward)


def _gradients(spec, h, clusters, own, rows, stats, cotangent):
    """(dh, dclusters) of the statistics, every block made again."""
    if _in_parts(clusters, spec):
        return _joined_gradients(h, clusters, own, rows, spec, stats, cotangent)

    def one(block, sums):
        own_stats, nll, log_sum = _of_block(block, stats, cotangent)
        dlatent, dweight = _latent_gradients(block, own_stats, nll, log_sum, sums.weight)
        dstates, dkernel = _through_kernel(block, dlatent, sums.kernel)
        return dstates, Cluster(dkernel, dweight)

    like = (h, clusters, own, cotangent)
    sums = jax.tree.map(lambda a: zeros(a.shape, like), clusters)
    return walk(h, clusters, own, rows, spec, zeros(h.shape, like), sums, one)


# --- sums for training -------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _loss(h, clusters, own, rows, spec, z_loss_weight):
    nll, largest, log_sum = _statistics(h, clusters, own, rows, spec)
    return _sums(nll, largest + log_sum, z_loss_weight)


def _sums(nll, lse, z_loss_weight):
    """(objective, nats) of some tokens, those of no cluster 0."""
    penalty = z_loss_weight * lse**2 if z_loss_weight else 0
    return jnp.sum(nll + penalty), jnp.sum(nll)


def _loss_forward(h, clusters, own, rows, spec, z_loss_weight):
    made = functools.partial(_loss_and_gradients, z_loss_weight)
    sums, gradients = _once(made, spec, h, clusters, own, rows)
    return sums, (gradients, h, clusters)


def _loss_and_gradients(z_loss_weight, spec, h, clusters, own, rows):
    """((objective, nats), (dh, dclusters))."""
    if _in_parts(clusters, spec):
        stats = nll, largest, log_sum = _joined_statistics(h, clusters, own, rows, spec)
        lse = largest + log_sum
        cotangent = (jnp.ones_like(nll), jnp.zeros_like(nll), 2 * z_loss_weight * lse)
        gradients = _joined_gradients(h, clusters, own, rows, spec, stats, cotangent)
        return _sums(nll, lse, z_loss_weight), gradients

    def one(block, carry):
        objective, nats, sums = carry
        stats = _block_statistics(block)
        lse = stats.max + stats.log_sum
        more = _sums(
            jnp.where(block.real, stats.nll, 0), jnp.where(block.real, lse, 0), z_loss_weight
        )
        g_log_sum = 2 * z_loss_weight * lse
        one = jnp.ones_like(lse)
        dlatent, dweight = _latent_gradients(block, stats, one, g_log_sum, sums.weight)
        dstates, dkernel = _through_kernel(block, dlatent, sums.kernel)
        return dstates, (objective + more[0], nats + more[1], Cluster(dkernel, dweight))

    like = (h, clusters, own)
    zero = zeros((), like)
    sums = jax.tree.map(lambda a: zeros(a.shape, like), clusters)
    carries = tuple((zero, zero, own_sums) for own_sums in sums)
    dh, done = walk(h, clusters, own, rows, spec, zeros(h.shape, like), carries, one)
    objective, nats, dclusters = zip(*done, strict=True)
    totals = sum_shards((sum(objective), sum(nats)), clusters[0].weight)  # of one shard
    return totals, (dh, dclusters)


def _loss_backward(spec, z_loss_weight, residuals, cotangent):
    gradients, h, clusters = residuals
    g, _ = cotangent  # the pure nats are reported, never differentiated
    dh, dclusters = jax.tree.map(lambda d: g * d, gradients)
    return narrow_like(dh, h), narrow_like(dclusters, clusters), None, None


_loss.defvjp(_loss_forward, _loss_backward)


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
