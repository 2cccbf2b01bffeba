"""Top-k by merging blocks equals a stable sort of everything: descending value, then ascending id."""

import jax
import numpy as np
import pytest

from headlab.ops import empty_top_k, merge_top_k

_merge = jax.jit(merge_top_k)


def _sorted(values, k):
    order = np.argsort(-values, axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(values, order, axis=-1), order


def _merged(values, k, blocks):
    best = empty_top_k(values.shape[:-1], k, values.dtype)
    for ids in blocks:
        best = _merge(*best, values[..., ids], np.asarray(ids, np.int32))
    return best


@pytest.mark.parametrize("k", [1, 3, 12])
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("size", [1, 5, 12])
def test_blocks_in_any_order_give_the_sorted_values_and_ties_by_id(k, order, size):
    values = np.random.default_rng(0).integers(0, 4, (3, 12)).astype(np.float32)  # many ties
    blocks = [range(i, min(i + size, 12)) for i in range(0, 12, size)][::order]
    found_values, found_ids = _merged(values, k, blocks)
    wanted_values, wanted_ids = _sorted(values, k)
    np.testing.assert_array_equal(found_values, wanted_values)
    np.testing.assert_array_equal(found_ids, wanted_ids)


def test_interleaved_ids_are_ordered_too():
    values = np.zeros((1, 12), np.float32)
    _, ids = _merged(values, 5, [range(1, 12, 2), range(0, 12, 2)])
    np.testing.assert_array_equal(ids, [[0, 1, 2, 3, 4]])


def test_a_probability_of_zero_still_comes_before_no_candidate():
    values = np.full((1, 3), -np.inf, np.float32)
    _, ids = _merged(values, 3, [range(3)])
    np.testing.assert_array_equal(ids, [[0, 1, 2]])
