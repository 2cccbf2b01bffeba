"""Attention and its softmax against automatic gradients of the plain formulas in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headlab.ops import causal_attention, softmax

BF16 = 2.0**-8


def _draw(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=s) for s in shapes]


def _plain(q, k, v):
    """softmax(q·kᵀ/√width + mask)·v with keys and values repeated for each query head."""
    length, n_heads, width = q.shape[1:]
    k, v = (jnp.repeat(a, n_heads // a.shape[2], axis=2) for a in (k, v))
    scores = jnp.einsum("bthw,bshw->bhts", q, k) / np.sqrt(width)
    scores = jnp.where(np.tri(length, dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhts,bshw->bthw", jax.nn.softmax(scores, axis=-1), v)


@functools.cache
def _pulled(function):
    """(x, g) → the values of `function` and its gradient pulled back from g, from one program."""

    def both(x, g):
        values, pull = jax.vjp(function, x)
        return values, pull(g)[0]

    return jax.jit(both)


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 1), (0, 4)])
def test_softmax_and_its_gradient_equal_the_automatic_ones(shape):
    x, g = _draw(shape, shape)
    with jax.enable_x64(True):
        y, gradient = _pulled(softmax)(5 * x, g)
        expected, wanted = _pulled(jax.nn.softmax)(5 * x, g)
        np.testing.assert_allclose(y, expected, rtol=1e-14)
        np.testing.assert_allclose(gradient, wanted, rtol=1e-12, atol=1e-15)


def test_softmax_of_huge_equal_logits_is_even():
    np.testing.assert_array_equal(softmax(jnp.full(4, 1e30)), np.full(4, 0.25, np.float32))


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 6])
def test_attention_and_its_gradients_equal_the_plain_formula(n_kv_heads, length):
    q, k, v, g = _draw(
        (2, length, 4, 3), (2, length, n_kv_heads, 3), (2, length, n_kv_heads, 3), (2, length, 4, 3)
    )
    with jax.enable_x64(True):
        out, pull = jax.vjp(jax.jit(causal_attention), q, k, v)
        expected, expected_pull = jax.vjp(jax.jit(_plain), q, k, v)
        np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-14)
        for found, wanted in zip(pull(jnp.asarray(g)), expected_pull(jnp.asarray(g)), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-13)


def test_grouped_heads_read_their_own_group():
    """Query head i reads key-value head i // (n_heads // n_kv_heads): with one group silenced only it changes."""
    q, k, v = _draw((1, 4, 4, 3), (1, 4, 2, 3), (1, 4, 2, 3))
    before = causal_attention(*map(jnp.float32, (q, k, v)))
    v[:, :, 1] = 0
    after = causal_attention(*map(jnp.float32, (q, k, v)))
    np.testing.assert_array_equal(before[:, :, :2], after[:, :, :2])
    assert not np.any(after[:, :, 2:])


def test_a_position_sees_no_later_one():
    q, k, v = _draw((1, 6, 2, 4), (1, 6, 2, 4), (1, 6, 2, 4))
    before = causal_attention(*map(jnp.float32, (q, k, v)))
    k[:, 3:], v[:, 3:] = 1e4, -1e4
    after = causal_attention(*map(jnp.float32, (q, k, v)))
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert np.all(before[:, 3:] != after[:, 3:])


def test_bfloat16_attention_keeps_its_scores_in_float32():
    """Inputs are exact in bfloat16; the scaled query, the weights and the result are rounded to it once each."""
    arrays = [np.asarray(jnp.asarray(a, jnp.bfloat16)) for a in _draw(*[(2, 16, 2, 8)] * 3)]
    out = causal_attention(*map(jnp.asarray, arrays))
    assert out.dtype == jnp.bfloat16
    with jax.enable_x64(True):
        q, k, v = (np.asarray(a, np.float64) for a in arrays)
        expected = np.asarray(_plain(q, k, v))
    scores = np.abs(np.einsum("bthw,bshw->bhts", q, k)).max() / np.sqrt(8)
    # Rounding the query moves a score by up to BF16·|score|, hence a weight by that share; |v| bounds what it weighs.
    tolerance = BF16 * (2 * scores + 2) * np.abs(v).max()
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=tolerance)
