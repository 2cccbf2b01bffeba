"""The logits of mixtape against a loop over tokens, rows and leaves in float64, and softmaxes joined from parts."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headlab.ops import LinearSpec, LogitMap, linear_statistics
from headlab.ops.mixtape import (
    MixtapeRows,
    MixtapeSpec,
    MixtapeStates,
    Part,
    join_statistics,
    mix,
    mixtape_statistics,
)

TOKENS, ROWS, REAL, WIDTH, GATE = 5, 8, 6, 4, 3
MAP = LogitMap(scale=-1.3, softcap=4.0)


_statistics = jax.jit(mixtape_statistics, static_argnums=3)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _leaf_products(gates):
    """π of a tree of gates [K−1], leaf by leaf: the product along the path from the root."""
    leaves = len(gates) + 1
    depth = leaves.bit_length() - 1
    priors = []
    for path in itertools.product((0, 1), repeat=depth):
        node, share = 0, 1.0
        for turn in path:
            share *= gates[node] if turn == 0 else 1 - gates[node]
            node = 2 * node + 1 + turn
        priors.append(share)
    return np.array(priors)


def _draw(experts, bias=True, seed=0):
    rng = np.random.default_rng(seed)
    states = MixtapeStates(
        rng.normal(size=(TOKENS, experts, WIDTH)),
        rng.normal(size=(TOKENS, experts - 1, GATE)),
        rng.normal(size=(TOKENS, experts - 1)),
    )
    rows = MixtapeRows(
        rng.normal(size=(ROWS, WIDTH)),
        rng.normal(size=(ROWS, GATE)),
        rng.normal(size=(ROWS, experts - 1)),
        rng.normal(size=ROWS) if bias else None,
    )
    return states, rows


def _logits(states, rows):
    """[tokens, rows], one at a time."""
    z = np.zeros((TOKENS, ROWS))
    for t, v in np.ndindex(z.shape):
        opened = _sigmoid(states.gates[t] @ rows.gate[v] + states.shared[t] + rows.gate_bias[v])
        z[t, v] = _leaf_products(opened) @ (states.contexts[t] @ rows.weight[v])
        z[t, v] += 0 if rows.bias is None else rows.bias[v]
    return MAP.softcap * np.tanh(MAP.scale * z / MAP.softcap)


def _wide(tree):
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), tree)


def test_a_tree_of_four_leaves_is_the_papers():
    a, b, c = 0.2, 0.7, 0.4
    leaves = np.eye(4)
    found = mix(list(leaves), [a, b, c])
    np.testing.assert_allclose(found, [a * b, a * (1 - b), (1 - a) * c, (1 - a) * (1 - c)])


@pytest.mark.parametrize("experts", [1, 2, 4, 8])
def test_the_leaves_of_a_tree_sum_to_one(experts):
    gates = np.random.default_rng(0).uniform(size=experts - 1)
    priors = mix(list(np.eye(experts)), list(gates))
    np.testing.assert_allclose(priors, _leaf_products(gates), atol=1e-15)
    np.testing.assert_allclose(np.sum(priors), 1, atol=1e-15)


@pytest.mark.parametrize("blocks", [(None, None), (2, 3), (1, 1)])
@pytest.mark.parametrize(("experts", "bias"), [(2, False), (4, True), (8, True)])
def test_statistics_equal_the_loop_in_float64(experts, bias, blocks):
    states, rows = _draw(experts, bias)
    logits = _logits(states, rows)[:, :REAL]
    targets = np.array([0, 5, 2, 2, 4], np.int32)
    spec = MixtapeSpec(LinearSpec(REAL, MAP, "float32", *blocks))
    with jax.enable_x64(True):
        found = _statistics(_wide(states), _wide(rows), targets, spec)
    lse = np.log(np.exp(logits).sum(axis=1))
    log_probs = logits - lse[:, None]
    np.testing.assert_allclose(found.nll, -log_probs[np.arange(TOKENS), targets], atol=1e-12)
    np.testing.assert_allclose(found.max + found.log_sum, lse, atol=1e-12)
    np.testing.assert_allclose(found.uniform_nll, -log_probs.mean(axis=1), atol=1e-12)


@pytest.mark.parametrize(
    ("experts", "bias", "blocks"), [(2, False, (2, 3)), (4, True, (None, None))]
)
def test_gradients_equal_finite_differences(experts, bias, blocks):
    """Of a sum of all statistics with weights of their own; the padding rows get exactly nothing."""
    spec = MixtapeSpec(LinearSpec(REAL, MAP, "float32", *blocks))
    targets = np.array([0, 5, 2, 2, 4], np.int32)
    rng = np.random.default_rng(1)
    weights = rng.normal(size=(3, TOKENS))

    @jax.jit
    def value(states, rows):
        s = mixtape_statistics(states, rows, targets, spec)
        lse = s.max + s.log_sum
        return jnp.sum(weights[0] * s.nll + weights[1] * lse + weights[2] * s.uniform_nll)

    with jax.enable_x64(True):
        point = _wide(_draw(experts, bias))
        gradient = jax.jit(jax.grad(value, argnums=(0, 1)))(*point)
        for leaf in jax.tree.leaves(gradient[1]):
            assert not np.any(leaf[REAL:])
        for at in range(len(jax.tree.leaves(point))):  # each array on its own
            leaves, shape = jax.tree.flatten(point)
            direction = rng.normal(size=leaves[at].shape)
            # Truncation 1e-10 times third derivatives of some tens, rounding 1e-15·10/1e-5: below 1e-8 both.
            ahead, behind = (
                value(
                    *shape.unflatten([*leaves[:at], leaves[at] + s * direction, *leaves[at + 1 :]])
                )
                for s in (1e-5, -1e-5)
            )
            slope = np.sum(np.asarray(jax.tree.leaves(gradient)[at]) * direction)
            np.testing.assert_allclose((ahead - behind) / 2e-5, slope, rtol=1e-6, atol=1e-7)


def test_an_unknown_target_is_nan_and_so_is_its_gradient_alone():
    states, rows = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), _draw(4))
    spec = MixtapeSpec(LinearSpec(REAL, MAP))
    targets = np.array([0, REAL, 2, -1, 4], np.int32)

    @jax.jit
    def nll_and_gradient(states):
        nll, pull = jax.vjp(lambda s: mixtape_statistics(s, rows, targets, spec).nll, states)
        return nll, *pull(jnp.ones(TOKENS))

    nll, gradient = nll_and_gradient(states)
    np.testing.assert_array_equal(np.isnan(nll), [0, 1, 0, 1, 0])
    np.testing.assert_array_equal(np.isnan(gradient.shared).any(axis=1), [0, 1, 0, 1, 0])


def test_no_tokens_are_no_statistics():
    states, rows = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), _draw(4))
    nobody = jax.tree.map(lambda a: a[:0], states)
    spec = MixtapeSpec(LinearSpec(REAL, MAP))
    found = _statistics(nobody, rows, jnp.zeros(0, jnp.int32), spec)
    assert {a.shape for a in found} == {(0,)}


def _parts(h, weight, targets, cut):
    """The statistics of the rows before `cut`, and of those from it on."""
    parts = []
    for low, high in ((0, cut), (cut, len(weight))):
        holds = (targets >= low) & (targets < high)
        own = jnp.where(holds, targets - low, 0)
        rows = weight[low:high]
        stats = linear_statistics(h, rows, None, own, LinearSpec(high - low))
        parts.append(Part(stats, high - low, holds))
    return parts


@pytest.mark.parametrize("cut", [1, 3, 8])
def test_joined_parts_are_the_statistics_of_all_rows(cut):
    rng = np.random.default_rng(0)
    targets = jnp.array([0, 8, 2, 3, 7], jnp.int32)
    with jax.enable_x64(True):
        h, weight = (jnp.asarray(rng.normal(size=(n, WIDTH))) for n in (TOKENS, 9))

        @jax.jit
        def joined(h, weight):
            return join_statistics(_parts(h, weight, targets, cut))

        @jax.jit
        def whole(h, weight):
            return linear_statistics(h, weight, None, targets, LinearSpec(9))

        def value(of):
            def total(h, weight):
                s = of(h, weight)
                return jnp.sum(s.nll**2 + (s.max + s.log_sum) ** 2 + s.uniform_nll**2)

            return total

        for found, wanted in zip(joined(h, weight), whole(h, weight), strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-13)
        gradients = (
            jax.jit(jax.grad(value(f), argnums=(0, 1)))(h, weight) for f in (joined, whole)
        )
        for found, wanted in zip(*map(jax.tree.leaves, gradients), strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-12)


@pytest.mark.parametrize("size", [1e8, -1e8])
def test_joining_parts_of_huge_equal_logits_gives_the_log_of_their_count(size):
    """Exactly what one softmax of them gives: nothing of the size of the logits is added to what is small."""
    h, weight = jnp.full((TOKENS, 1), size), jnp.ones((9, 1))
    targets = jnp.array([0, 8, 2, 3, 7], jnp.int32)
    found = jax.jit(lambda h, weight: join_statistics(_parts(h, weight, targets, 3)))(h, weight)
    np.testing.assert_allclose(found.nll, np.log(9), rtol=4e-7)
    np.testing.assert_allclose(found.uniform_nll, np.log(9), rtol=4e-7)
