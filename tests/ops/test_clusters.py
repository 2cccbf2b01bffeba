"""Softmaxes over clusters, each for its own tokens: values, gradients, and no work for others' tokens."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headlab.ops import LogitMap
from headlab.ops.clusters import Cluster, ClusterSpec, cluster_loss, cluster_statistics

WIDTH, SIZES, ROWS, LATENT = 6, (5, 1, 9), (8, 1, 12), (3, 2, 1)
EPS = float(np.finfo(np.float32).eps)

# which cluster each token is in; numbers outside 0 … 2 are none
OWN = {
    "all": [2, 0, -1, 1, 2, 2, 3, 0, 1, 2, 0, 2, -1, 2, 2],
    "none of the middle one": [0, 2, 0, 0, 2, -1, 2, 2, 2, 0, 0, 0, 2, 2, 2],
    "one cluster alone": [2] * 15,
    "none at all": [-1, -1, 3] * 5,
    "as many as its rows": [0] * 5 + [1] + [2] * 9,
}


def problem(own, dtype=np.float64, seed=0):
    """(h, clusters, own, rows) with padded rows that are not zero: a leak would show."""
    rng = np.random.default_rng(seed)
    own = np.asarray(own, np.int32)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    clusters = tuple(
        Cluster(draw(WIDTH, width), draw(rows, width))
        for rows, width in zip(ROWS, LATENT, strict=True)
    )
    sizes = np.array([*SIZES, 1])[own] if own.size else np.zeros(0)
    rows = rng.integers(0, sizes) if own.size else np.zeros(0)
    return draw(own.size, WIDTH), clusters, jnp.asarray(own), jnp.asarray(rows, jnp.int32)


def dense(h, clusters, own, rows, logit_map):
    """(nll, lse) a token by whole matrices."""
    nll, lse = jnp.zeros(len(own)), jnp.zeros(len(own))
    for i, (kernel, weight) in enumerate(clusters):
        logits = logit_map(h @ kernel @ weight[: SIZES[i]].T)
        own_lse = jax.scipy.special.logsumexp(logits, axis=1)
        target = jnp.take_along_axis(logits, jnp.where(own == i, rows, 0)[:, None], axis=1)[:, 0]
        lse = jnp.where(own == i, own_lse, lse)
        nll = jnp.where(own == i, own_lse - target, nll)
    return nll, lse


SPECS = {
    "whole": ClusterSpec(SIZES, LogitMap(1.5)),
    "blocks of 2 x 4": ClusterSpec(SIZES, LogitMap(-0.7, 2.0), token_block=2, vocab_block=4),
}


@functools.cache
def steps(name):
    """(ours, dense): value, statistics and gradients of a sum in which every number has its own weight."""
    spec = SPECS[name]

    def ours(arrays, own, rows, weights):
        stats = cluster_statistics(*arrays, own, rows, spec)
        loss = cluster_loss(*arrays, own, rows, spec, z_loss_weight=0.1)
        total = weights[0] @ stats.nll + weights[1] @ stats.lse + loss.objective / 7
        return total, (*stats, loss.objective, loss.nats)

    def wanted(arrays, own, rows, weights):
        nll, lse = dense(*arrays, own, rows, spec.logit_map)
        objective = jnp.sum(nll + 0.1 * lse**2)
        total = weights[0] @ nll + weights[1] @ lse + objective / 7
        return total, (nll, lse, objective, jnp.sum(nll))

    return tuple(jax.jit(jax.value_and_grad(f, has_aux=True)) for f in (ours, wanted))


def check_against_dense(name, own):
    """In float64, to some hundred roundings of numbers below 100."""
    with jax.enable_x64(True):
        h, clusters, own, rows = problem(own)
        weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, len(own))))
        found, expected = (f((h, clusters), own, rows, weights) for f in steps(name))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert a.dtype == jnp.float64
            np.testing.assert_allclose(a, b, rtol=0, atol=100 * 100 * 2**-53)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
def test_values_and_gradients_are_those_of_whole_matrices(own, name):
    check_against_dense(name, own)


@pytest.mark.parametrize("own", [[], [1]])
def test_no_token_and_one_token_work(own):
    check_against_dense("whole", own)


def test_padding_rows_and_tokens_of_no_cluster_get_nothing():
    h, clusters, own, rows = problem(OWN["all"], np.float32)
    spec, outside = ClusterSpec(SIZES), (np.asarray(own) < 0) | (np.asarray(own) > 2)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
    def gradients(h, clusters):
        loss = cluster_loss(h, clusters, own, rows, spec, z_loss_weight=0.1)
        return loss.objective, cluster_statistics(h, clusters, own, rows, spec)

    (dh, dclusters), stats = jax.device_get(gradients(h, clusters))
    assert not np.any(stats.nll[outside]) and not np.any(stats.lse[outside])
    assert not np.any(dh[outside]) and np.all(np.any(dh[~outside], axis=1))
    for gradient, size in zip(dclusters, SIZES, strict=True):
        assert not np.any(gradient.weight[size:])


@pytest.mark.parametrize("kind", ["loss", "nll"])
def test_nothing_is_computed_of_a_cluster_without_tokens(kind):
    """Its arrays hold NaN, as do the states of tokens that are in no cluster: neither is touched."""
    h, clusters, own, rows = problem([0, -1, 2, 0, 0, 2], np.float32)
    h = h.at[1].set(jnp.nan)
    poisoned = (clusters[0], Cluster(*(a * jnp.nan for a in clusters[1])), clusters[2])

    @jax.jit
    @jax.value_and_grad
    def value(arrays):
        if kind == "loss":
            return cluster_loss(*arrays, own, rows, ClusterSpec(SIZES)).objective
        return jnp.sum(cluster_statistics(*arrays, own, rows, ClusterSpec(SIZES)).nll)

    total, (dh, dclusters) = value((h, poisoned))
    assert np.isfinite(total)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves((dh, dclusters)))
    assert not np.any(dclusters[1].weight) and not np.any(dclusters[1].kernel)


class CountingMap(NamedTuple):
    """The map t = z, which says of every block of logits that it was made."""

    log: tuple  # one list, in a tuple with its own identity

    def __call__(self, z):
        jax.debug.callback(lambda: self.log[0].append(z.shape))
        return z

    def derivative(self, z):
        return 1.0

    def __hash__(self):
        return id(self.log)


@functools.cache
def counted():
    """(the log of the blocks that are made, the compiled value of the loss)."""
    log = ([],)
    spec = ClusterSpec(SIZES, CountingMap(log), token_block=4)
    h, clusters, _, _ = problem([-1] * 22, np.float32)
    rows = jnp.zeros(22, jnp.int32)
    return log[0], jax.jit(lambda own: cluster_loss(h, clusters, own, rows, spec).nats)


@pytest.mark.parametrize("counts", [(0, 0, 0), (1, 4, 5), (0, 9, 0), (8, 0, 13)])
def test_the_blocks_of_a_cluster_are_as_many_as_its_tokens_fill(counts):
    """⌈tokens/4⌉ of each under one compilation, for the value of the loss."""
    log, loss = counted()
    own = np.full(22, -1, np.int32)
    own[: sum(counts)] = np.repeat(np.arange(3), counts)
    log.clear()
    loss(np.random.default_rng(0).permutation(own)).block_until_ready()
    jax.effects_barrier()
    made = [log.count((rows, 4)) for rows in ROWS]
    assert made == [-(-n // 4) for n in counts]


def test_blocks_change_rounding_alone():
    h, clusters, own, rows = problem(np.arange(40) % 5 - 1, np.float32)

    def run(**blocks):
        spec = ClusterSpec(SIZES, **blocks)

        def loss(h, clusters):
            return cluster_loss(h, clusters, own, rows, spec, z_loss_weight=0.1).objective

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(h, clusters)

    wanted = run()
    for blocks in (dict(token_block=1, vocab_block=1), dict(token_block=7, vocab_block=5)):
        for a, b in zip(jax.tree.leaves(run(**blocks)), jax.tree.leaves(wanted), strict=True):
            # Sums of some forty terms of the size of the largest, each with a few roundings.
            np.testing.assert_allclose(a, b, rtol=0, atol=40 * 8 * EPS * float(jnp.abs(b).max()))


def test_bfloat16_states_and_float32_clusters_mix():
    """The gradients come in the dtypes of what they belong to, statistics in float32, and near the float32 ones."""
    h, clusters, own, rows = problem(OWN["all"], np.float32)
    dtype = jnp.bfloat16
    rounded = h.astype(dtype)

    def both(h, clusters):
        stats = cluster_statistics(h, clusters, own, rows, ClusterSpec(SIZES))
        loss = cluster_loss(h, clusters, own, rows, ClusterSpec(SIZES))
        return loss.objective + jnp.sum(stats.nll), stats

    step = jax.jit(jax.value_and_grad(both, argnums=(0, 1), has_aux=True))
    (value, stats), (dh, dclusters) = step(rounded, clusters)
    assert value.dtype == stats.nll.dtype == stats.lse.dtype == jnp.float32
    assert dh.dtype == dtype
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(dclusters))
    (exact, _), wanted = step(rounded.astype(jnp.float32), clusters)
    # The latent, the weights and the gradient in the logits are each rounded once; sums do not add that up.
    unit = float(jnp.finfo(dtype).eps) / 2
    assert abs(value / exact - 1) < 8 * unit
    for a, b in zip(jax.tree.leaves((dh, dclusters)), jax.tree.leaves(wanted), strict=True):
        difference = np.linalg.norm(np.asarray(a, np.float64) - np.asarray(b))
        assert difference <= 8 * unit * np.linalg.norm(b)


def test_vmap_is_one_after_the_other():
    own = np.asarray([[0, 2, 2, -1], [1, 1, 1, 1], [-1, -1, -1, -1]], np.int32)
    _, clusters, _, _ = problem([], np.float32)
    h = np.random.default_rng(0).normal(size=(3, 4, WIDTH)).astype(np.float32)
    rows = np.zeros((3, 4), np.int32)
    spec = ClusterSpec(SIZES, token_block=2)

    def loss(h, clusters, own, rows):
        stats = cluster_statistics(h, clusters, own, rows, spec)
        return cluster_loss(h, clusters, own, rows, spec).objective + jnp.sum(stats.nll**2)

    step = jax.value_and_grad(jax.checkpoint(loss), argnums=(0, 1))
    one, mapped = jax.jit(step), jax.jit(jax.vmap(step, in_axes=(0, None, 0, 0)))
    together = jax.device_get(mapped(h, clusters, own, rows))
    for i in range(3):
        alone = jax.device_get(one(h[i], clusters, own[i], rows[i]))
        for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=0, atol=64 * EPS * max(1, np.abs(b).max()))


@pytest.mark.parametrize("kind", ["loss", "nll"])
def test_second_and_forward_derivatives_are_refused_with_a_message(kind):
    h, clusters, own, rows = problem(OWN["all"], np.float32)

    def value(h):
        if kind == "loss":
            return cluster_loss(h, clusters, own, rows, ClusterSpec(SIZES)).objective
        return jnp.sum(cluster_statistics(h, clusters, own, rows, ClusterSpec(SIZES)).nll)

    with pytest.raises(NotImplementedError, match=r"second derivatives.*log_probs"):
        jax.eval_shape(jax.grad(lambda h: jnp.sum(jax.grad(value)(h) ** 2)), h)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(value, (h,), (h,))


@pytest.mark.optimised
@pytest.mark.parametrize("kind", ["loss", "nll"])
def test_gradients_of_a_table_are_added_to_in_place(kind):
    """The compiled loop copies, selects and transposes nothing of the size of a cluster's table."""
    sizes, widths = (3001, 5003), (24, 9)
    spec = ClusterSpec(sizes, token_block=8, vocab_block=1000)
    shapes = tuple(
        Cluster(
            jax.ShapeDtypeStruct((32, w), jnp.float32), jax.ShapeDtypeStruct((n, w), jnp.float32)
        )
        for n, w in zip(sizes, widths, strict=True)
    )
    ids = jax.ShapeDtypeStruct((64,), jnp.int32)

    def value(h, clusters, own, rows):
        if kind == "loss":
            return cluster_loss(h, clusters, own, rows, spec).objective
        return jnp.sum(cluster_statistics(h, clusters, own, rows, spec).nll)

    step = jax.jit(jax.grad(value, argnums=(0, 1)))
    states = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    text = step.lower(states, shapes, ids, ids).compile().as_text()
    tables = "|".join(rf"{n},{w}|{w},{n}" for n, w in zip(sizes, widths, strict=True))
    found = re.findall(rf"= \w+\[(?:{tables})\]\S* ([\w-]+)\(", text)
    assert "dynamic-update-slice" in found or "fusion" in found
    assert not {"copy", "select", "transpose", "conditional"} & set(found)
