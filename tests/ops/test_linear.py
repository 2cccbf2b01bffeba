"""The matrix multiply with explicit gradients against the automatic ones of `x @ kernel`."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from headlab.ops import linear


@pytest.mark.parametrize("tokens", [(), (5,), (2, 3), (2, 3, 4), (0,)])
def test_value_and_gradients_equal_the_automatic_ones(tokens):
    rng = np.random.default_rng(0)
    x, kernel, g = (rng.normal(size=s) for s in ((*tokens, 4), (4, 3), (*tokens, 3)))
    with jax.enable_x64(True):
        out, pull = jax.vjp(linear, jnp.asarray(x), jnp.asarray(kernel))
        expected, expected_pull = jax.vjp(jnp.matmul, jnp.asarray(x), jnp.asarray(kernel))
        np.testing.assert_allclose(out, expected, rtol=1e-13, atol=1e-14)
        for found, wanted in zip(pull(jnp.asarray(g)), expected_pull(jnp.asarray(g)), strict=True):
            assert found.shape == wanted.shape
            np.testing.assert_allclose(found, wanted, rtol=1e-13, atol=1e-14)


def test_the_kernel_gradient_of_bfloat16_states_is_summed_in_float32():
    """All inputs are exact in bfloat16 and all sums of 512 products are exact in float32, so the result is exact."""
    rng = np.random.default_rng(0)
    x, g = (rng.integers(-8, 9, size=(512, n)) / 8 for n in (4, 3))
    kernel = rng.integers(-8, 9, size=(4, 3)) / 8
    out, pull = jax.vjp(linear, jnp.asarray(x, jnp.bfloat16), jnp.asarray(kernel, jnp.float32))
    assert out.dtype == jnp.bfloat16
    dx, dkernel = pull(jnp.asarray(g, jnp.bfloat16))
    assert (dx.dtype, dkernel.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(dkernel, (x.T @ g).astype(np.float32))
    np.testing.assert_array_equal(dx, (g @ kernel.T).astype(ml_dtypes.bfloat16))


def test_it_composes_with_jit_vmap_and_remat():
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((6, 5, 4), (4, 3)))

    def total(x, kernel):
        return jnp.sum(jnp.sin(linear(x, kernel)))

    one_by_one = jax.jit(jax.vmap(jax.grad(jax.checkpoint(total), argnums=1), (0, None)))(x, kernel)
    together = jax.grad(total, argnums=1)(x, kernel)
    # 30 products of size about 1 a sum.
    np.testing.assert_allclose(one_by_one.sum(0), together, atol=30 * 2e-7)
