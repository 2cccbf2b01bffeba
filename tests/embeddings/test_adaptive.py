"""The adaptive embedding: rows by band, whatever the order of tokens, with the gradient of whole matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from headlab.embeddings import Constant, Table
from headlab.embeddings.adaptive import Adaptive

VOCAB, WIDTH, CUTOFFS = 11, 6, (4, 8)
COUNTS = np.random.default_rng(3).permutation(VOCAB)
EPS = float(np.finfo(np.float32).eps)


def embedding(**changed):
    given = dict(cutoffs=CUTOFFS, div_value=2.0, vocab_multiple=8, token_counts=COUNTS)
    return Adaptive(VOCAB, WIDTH, rngs=nnx.Rngs(0), **(given | changed))


def dense(bands, counts=COUNTS):
    """[V, d] by token id: the bands of descending count, ids ascending in each."""
    by_count = np.argsort(-counts, kind="stable")
    parts, start = {}, 0
    for band, end in zip(bands, (*CUTOFFS, VOCAB), strict=True):
        ids = np.sort(by_count[start:end])
        rows = band["weight"][: end - start]
        rows = rows @ band["kernel"] if "kernel" in band else rows
        parts.update(dict(zip(ids.tolist(), rows, strict=True)))
        start = end
    return jnp.stack([parts[i] for i in range(VOCAB)])


def bands_of(module):
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))["bands"].values()


def test_every_token_has_its_row_in_its_band():
    module = embedding()
    found = module(jnp.arange(VOCAB))
    np.testing.assert_allclose(found, dense(bands_of(module)), rtol=0, atol=8 * EPS)
    assert [b.weight.shape for b in module.bands] == [(8, 6), (8, 3), (8, 1)]
    assert [b.kernel is None for b in module.bands] == [True, False, False]


def test_ids_of_any_shape_give_rows_in_the_asked_dtype_and_unknown_ones_nan():
    module = embedding()
    ids = jnp.asarray([[0, -1, 5], [11, 10, 2**31 - 1]])
    rows = jax.jit(lambda ids: module(ids, jnp.bfloat16))(ids)
    assert rows.shape == (2, 3, WIDTH) and rows.dtype == jnp.bfloat16
    unknown = np.array([[False, True, False], [True, False, True]])
    assert np.isnan(np.asarray(rows, np.float32)[unknown]).all()
    exact = np.asarray(module(ids), np.float64)[~unknown]
    # The row, the kernel and the product are each rounded to bfloat16.
    close = 4 * 2.0**-8 * np.abs(exact).max()
    np.testing.assert_allclose(np.asarray(rows, np.float64)[~unknown], exact, atol=close)
    assert module(jnp.zeros((0,), jnp.int32)).shape == (0, WIDTH)


def test_the_gradient_is_that_of_whole_matrices():
    """Repeated ids add up; unknown ids, other rows and the padding get nothing."""
    module = embedding()
    graph, params, constants = nnx.split(module, nnx.Param, Constant)
    ids = jnp.asarray([3, 3, 9, 0, -1, 9, 3, 99])
    known = (ids >= 0) & (ids < VOCAB)
    weights = jax.random.normal(jax.random.key(1), (8, WIDTH))

    def ours(params):
        rows = nnx.merge(graph, params, constants)(ids)
        return jnp.sum(jnp.where(known[:, None], rows * weights, 0))

    def wanted(params):
        rows = dense(nnx.to_pure_dict(params)["bands"].values())[jnp.where(known, ids, 0)]
        return jnp.sum(jnp.where(known[:, None], rows * weights, 0))

    found, expected = jax.jit(jax.grad(ours))(params), jax.grad(wanted)(params)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=32 * EPS)
    for band in bands_of(nnx.merge(graph, found, constants)):
        assert not np.any(band["weight"][4:])


def test_without_cutoffs_it_is_a_plain_table():
    module = embedding(cutoffs=())
    table = Table(VOCAB, WIDTH, rngs=nnx.Rngs(0), vocab_multiple=8)
    np.testing.assert_array_equal(module.bands[0].weight[...], table.weight[...])
    ids = jnp.arange(-1, VOCAB + 1)
    np.testing.assert_array_equal(module(ids), table(ids))


def test_embeddings_start_with_the_spread_of_a_table():
    """Entries of every band have standard deviation init_scale/√d."""
    width, scale = 256, 0.5
    counts = np.arange(6000, 0, -1)
    module = Adaptive(
        6000,
        width,
        rngs=nnx.Rngs(0),
        init_scale=scale,
        cutoffs=(2000, 4000),
        token_counts=counts,
    )
    variances = np.asarray(module(jnp.arange(6000)), np.float64).reshape(3, -1).var(axis=1)
    # The squares of a band's kernel, 16·256 at least, average to 1/d within √(2/(16·256)) = 2.2% a deviation, those of
    # its rows within less: five deviations.
    np.testing.assert_allclose(variances, scale**2 / width, rtol=0.11)


def test_the_order_is_a_constant_and_parameters_are_counted_without_padding():
    module = embedding()
    constants = nnx.state(module, Constant)
    assert {a.dtype for a in jax.tree.leaves(constants)} == {jnp.dtype("int32")}
    assert len(jax.tree.leaves(constants)) == 2
    assert module.parameter_count() == 4 * 6 + (4 + 6) * 3 + (3 + 6) * 1
    plain = embedding(vocab_multiple=1)
    sizes = [a.size for a in jax.tree.leaves(nnx.state(plain, nnx.Param))]
    assert sum(sizes) == plain.parameter_count() == module.parameter_count()


def test_impossible_bands_are_refused():
    with pytest.raises(ValueError, match="11 is not in 1 … 10"):
        embedding(cutoffs=(4, 11))
    with pytest.raises(ValueError, match=r"div_value is 4\.0; band 2 .* = 0"):
        embedding(div_value=4.0)
    with pytest.raises(ValueError, match="needs token_counts"):
        embedding(cutoffs="auto", token_counts=None)
