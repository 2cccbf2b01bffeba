"""Rows on shards, and sums in an order that the number of shards doesn't change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headlab import sharding
from headlab.ops import linear_cross_entropy, sum_by_blocks, top_k
from headlab.ops.shards import fold_pairs, is_sharded, isolated, take_rows
from headlab.ops.softmax_tree import blocks_of_shard

ROWS, EVERYWHERE = sharding.BY_ROWS, sharding.REPLICATED


def on(vocab, function, in_specs, out_specs):
    mesh = sharding.make_mesh(1, vocab)
    return jax.jit(sharding.on_mesh(function, mesh, in_specs=in_specs, out_specs=out_specs))


def test_pairs_are_folded_along_a_balanced_tree():
    assert fold_pairs(lambda a, b: f"({a}{b})", "abcdefgh") == "(((ab)(cd))((ef)(gh)))"
    assert fold_pairs(lambda a, b: a + b, [3]) == 3
    with pytest.raises(ValueError, match="6 parts; .* power of two"):
        fold_pairs(lambda a, b: a + b, range(6))


def test_what_is_isolated_computes_the_same_and_has_the_same_derivatives():
    def f(x, y):
        return {"a": jnp.sin(x) * y["b"], "c": y["b"] ** 2}

    x, y = jnp.arange(3.0), {"b": jnp.array([1.0, -2.0, 0.5])}
    found = jax.jit(lambda x, y: isolated(f, x, y))(x, y)
    jax.tree.map(np.testing.assert_allclose, found, f(x, y))

    def slope(function):
        total = lambda x, y: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(function(x, y)))  # noqa: E731
        return jax.grad(lambda x: jnp.sum(jax.grad(total, argnums=(0,))(x, y)[0] ** 2))(x)

    ours = slope(lambda x, y: isolated(f, x, y))
    np.testing.assert_allclose(ours, slope(f), rtol=1e-6)


def test_outside_a_mesh_all_rows_are_one_shard():
    weight = jnp.arange(8.0).reshape(4, 2)
    assert not is_sharded(weight)
    rows, mine = take_rows(weight, jnp.array([3, -1, 4, 0]))
    np.testing.assert_array_equal(rows, [[6, 7], [0, 0], [0, 0], [0, 1]])
    assert mine.tolist() == [True, False, False, True]


@pytest.mark.parametrize("vocab", [1, 2, 8])
def test_each_shard_has_rows_of_its_own(vocab):
    weight = jnp.arange(16.0).reshape(8, 2)

    def rows(weight, ids):
        found, mine = take_rows(weight, ids)
        return jax.lax.psum((found, mine.astype(int)), "vocab")

    ids = jnp.array([7, 0, 3, 8, -1])
    found, owners = on(vocab, rows, (ROWS, EVERYWHERE), EVERYWHERE)(weight, ids)
    np.testing.assert_array_equal(found[:3], weight[ids[:3]])
    assert not np.any(found[3:]) and owners.tolist() == [1, 1, 1, 0, 0]


def test_blocks_that_do_not_cut_the_rows_are_refused_with_the_numbers():
    def blocks(rows, k):
        return lambda w: (blocks_of_shard(w, k), jnp.sum(w))[1][None]

    weight = jnp.ones((16, 2))
    for k, shards, message in (
        (6, 1, "sum_blocks is 6; it must be a power of two"),
        (32, 1, "sum_blocks is 32; it must divide the 16 padded rows"),
        (2, 4, "sum_blocks is 2 and there are 4 shards"),
    ):
        with pytest.raises(ValueError, match=message):
            on(shards, blocks(16, k), ROWS, ROWS)(weight)


@pytest.mark.optimised
@pytest.mark.parametrize("vocab", [2, 4, 8])
def test_a_sum_by_blocks_has_the_same_bits_on_any_number_of_shards(vocab):
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(64, 33)), jnp.float32)

    def square(rows):
        return sum_by_blocks(lambda a: jnp.sum(a * a), rows, 8)

    one, many = (on(n, square, ROWS, EVERYWHERE)(rows) for n in (1, vocab))
    np.testing.assert_array_equal(one, many)
    np.testing.assert_allclose(one, np.sum(np.asarray(rows, np.float64) ** 2), rtol=1e-6)


def test_the_public_loss_and_top_k_are_vocabulary_parallel():
    rng = np.random.default_rng(0)
    h, weight = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((9, 5), (16, 5)))
    weight = weight.at[12].set(weight[3])  # equal tokens on two shards: the lower id first
    targets = jnp.asarray([0, 1, 3, 4, 7, 8, 11, 12, 13])  # on both sides of every edge
    options = dict(vocab_size=14, softcap=4.0, label_smoothing=0.1, z_loss_weight=0.01)

    def loss(h, weight):
        value = linear_cross_entropy(h, weight, targets, **options)
        return value, top_k(h, weight, 14, vocab_size=14)

    def step(h, weight):
        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(h, weight)

    (value, best), (dh, dweight) = jax.jit(step)(h, weight)
    specs = ((EVERYWHERE, EVERYWHERE), (EVERYWHERE, ROWS))
    for vocab in (1, 4, 8):
        found = on(vocab, step, (EVERYWHERE, ROWS), specs)(h, weight)
        np.testing.assert_allclose(found[0][0], value, rtol=1e-6)
        np.testing.assert_allclose(found[0][1][0], best[0], atol=1e-6)
        np.testing.assert_array_equal(found[0][1][1], best[1])
        np.testing.assert_allclose(found[1][0], dh, atol=2e-6)
        np.testing.assert_allclose(found[1][1], dweight, atol=2e-6)
        assert not np.any(found[1][1][14:])


def test_an_unknown_id_is_nan_on_every_shard():
    h, weight = jnp.ones((3, 5)), jnp.ones((16, 5))
    targets = jnp.asarray([-1, 14, 15])

    def nll(h, weight):
        return linear_cross_entropy(h, weight, targets, vocab_size=14, reduction="none")

    assert np.isnan(on(4, nll, (EVERYWHERE, ROWS), EVERYWHERE)(h, weight)).all()
