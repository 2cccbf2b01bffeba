"""The most probable tokens of a linear softmax, against a stable sort of the dense float64 log-probabilities."""

import jax
import numpy as np
import pytest
from traced import largest_array

from headlab.ops import top_k


@pytest.mark.parametrize("k", [0, 1, 3, 6])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "logit_scale": -0.7}])
def test_values_and_ids_are_those_of_a_stable_sort(k, options, draw):
    h, weight, bias, *_ = draw(10, 6, 8)
    weight[4], bias[4] = weight[1], bias[1]  # equal logits: the lower id comes first
    z = (h @ weight[:6].T + bias[:6]) * options.get("logit_scale", 1.0)
    cap = options.get("softcap")
    logits = z if cap is None else cap * np.tanh(z / cap)
    log_probs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    order = np.argsort(-log_probs, axis=1, kind="stable")[:, :k]
    with jax.enable_x64(True):
        values, ids = jax.jit(
            lambda h, weight, bias: top_k(h, weight, k, bias=bias, vocab_size=6, **options)
        )(h.reshape(2, 5, 4), weight, bias)
    assert values.shape == ids.shape == (2, 5, k) and ids.dtype == np.int32
    np.testing.assert_array_equal(ids.reshape(10, k), order)
    found = np.take_along_axis(log_probs, order, axis=1)
    np.testing.assert_allclose(values.reshape(10, k), found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("k", [-1, 7])
def test_k_must_be_possible(k):
    h, weight = np.zeros((2, 4), np.float32), np.zeros((8, 4), np.float32)
    with pytest.raises(ValueError, match=f"k is {k}; it must be in 0 … 6"):
        top_k(h, weight, k, vocab_size=6)


def test_no_position_at_all_gives_empty_results():
    values, ids = top_k(np.zeros((0, 4), np.float32), np.zeros((8, 4), np.float32), 3)
    assert values.shape == ids.shape == (0, 3)


def test_nothing_of_the_size_of_all_logits_is_held():
    tokens, rows, d = 1 << 14, 1 << 17, 8
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((tokens, d), (rows, d))]
    largest = largest_array(lambda h, weight: top_k(h, weight, 5), *shapes)
    assert largest <= tokens * rows / 64, f"an array of {largest} elements is held"
