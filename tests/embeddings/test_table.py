"""The input embedding gives the rows of known ids, and NaN for every other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from headlab.embeddings import Table, init_rows, padded_size


def _table(vocab_size=5, vocab_multiple=8, d_model=3, seed=0):
    return Table(vocab_size, d_model, rngs=nnx.Rngs(seed), vocab_multiple=vocab_multiple)


@pytest.mark.parametrize(
    ("vocab_size", "multiple", "rows"),
    [(5, 1, 5), (5, 8, 8), (8, 8, 8), (9, 8, 16), (49_159, 128, 49_280), (129_280, 24, 129_288)],
)
def test_rows_are_the_least_multiple_that_holds_the_vocabulary(vocab_size, multiple, rows):
    assert padded_size(vocab_size, multiple) == rows


@pytest.mark.parametrize("ids", [[0, 4, 2], [[1, 1], [3, 0]], [], 3])
def test_look_up_gives_the_rows(ids):
    table = _table()
    ids = np.asarray(ids, np.int32)
    np.testing.assert_array_equal(table(ids), np.asarray(table.weight[...])[ids])


@pytest.mark.parametrize("unknown", [-1, 5, 7, 8, -100, 2**31 - 1])
def test_an_unknown_id_is_nan_and_only_it(unknown):
    rows = _table()(jnp.array([4, unknown, 0]))
    assert np.isnan(rows[1]).all() and np.isfinite(rows[jnp.array([0, 2])]).all()


def test_padding_rows_are_zero_and_get_no_gradient():
    table = _table()
    assert not np.any(table.weight[...][5:]) and np.all(table.weight[...][:5])
    graph, state = nnx.split(table)
    ids = jnp.array([0, 4, 4, -1, 5])

    def total(state):
        return jnp.sum(jnp.nan_to_num(nnx.merge(graph, state)(ids)))

    gradient = jax.grad(total)(state)["weight"][...]
    np.testing.assert_array_equal(gradient[:, 0], [1, 0, 0, 0, 2, 0, 0, 0])


def test_padding_does_not_change_the_first_rows():
    np.testing.assert_array_equal(
        _table(vocab_multiple=1).weight[...], _table(vocab_multiple=8).weight[...][:5]
    )


def test_rows_start_normal_with_the_stated_deviation():
    """The relative error of a standard deviation from n normals is 1/√(2n) ≈ 0.3%; four of them."""
    rows = np.asarray(init_rows(jax.random.key(0), 1000, 1024, 64, 0.5))[:1000]
    assert abs(rows.std() / (0.5 / 8) - 1) < 4 / np.sqrt(2 * rows.size)
    assert abs(rows.mean()) < 4 * (0.5 / 8) / np.sqrt(rows.size)


def test_the_asked_dtype_is_that_of_the_rows():
    table = _table()
    rows = table(jnp.array([1, 9]), dtype=jnp.bfloat16)
    assert rows.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rows[0], table.weight[...][1].astype(jnp.bfloat16))


@pytest.mark.parametrize(
    "bad", [dict(vocab_size=0), dict(d_model=0), dict(vocab_multiple=0), dict(vocab_size=-3)]
)
def test_impossible_sizes_are_refused_by_value(bad):
    ((name, value),) = bad.items()
    with pytest.raises(ValueError, match=rf"{name} is {value}; it must be at least 1"):
        _table(**bad)
