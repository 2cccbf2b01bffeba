"""Data-parallel gradients, taken inside a `shard_map` that checks what varies, equal those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from headlab.ops import (
    LinearSpec,
    linear,
    linear_loss,
    linear_statistics,
    sum_to_like,
    vary_like,
    varying_axes,
)

DATA, EVERYWHERE = PartitionSpec("data"), PartitionSpec()


def _mesh(n):
    return Mesh(np.array(jax.devices()[:n]), ("data",))


def _on(n, function, in_specs, out_specs):
    return jax.jit(
        jax.shard_map(
            function, mesh=_mesh(n), in_specs=in_specs, out_specs=out_specs, check_vma=True
        )
    )


def test_outside_a_mesh_nothing_varies_and_nothing_changes():
    x = jnp.ones(3)
    assert varying_axes(x) == frozenset()
    assert vary_like(x, x) is x
    assert sum_to_like(x, x) is x


def test_vary_and_sum_are_each_others_transpose():
    def body(x, y):
        marked = vary_like(y, x)
        assert varying_axes(marked) == {"data"} and varying_axes(y) == frozenset()
        return sum_to_like(x * marked, y)

    out = _on(8, body, (DATA, EVERYWHERE), EVERYWHERE)(jnp.arange(8.0), jnp.full(1, 2.0))
    np.testing.assert_array_equal(out, [2 * 28.0])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n", [2, 8])
def test_data_parallel_gradients_equal_those_of_one_device(n, bias, draw):
    """In float64, so that only the order of sums differs: 32 terms of size below 100."""
    with jax.enable_x64(True):
        h, weight, own_bias, targets, where = map(jnp.asarray, draw(32, 5, 8))
        own_bias = own_bias if bias else None
        kernel = jnp.asarray(np.random.default_rng(3).normal(size=(4, 4)))
        spec = LinearSpec(5, token_block=2, vocab_block=4)

        def local(params, h, targets, where):
            kernel, weight, own_bias = params
            mixed = linear(h, kernel)
            sums = linear_loss(
                mixed,
                weight,
                own_bias,
                targets,
                where,
                spec,
                z_loss_weight=0.1,
                label_smoothing=0.1,
            )
            stats = linear_statistics(mixed, weight, own_bias, targets, spec)
            return sums.objective + jnp.sum(jnp.where(where, stats.nll**2 + stats.uniform_nll, 0))

        params = (kernel, weight, own_bias)
        both = jax.value_and_grad(local, argnums=(0, 1))
        value, (dparams, dh) = jax.jit(both)(params, h, targets, where)

        def body(params, *arrays):
            value, gradient = both(params, *arrays)
            return jax.lax.psum(value, "data"), gradient

        found = _on(n, body, (EVERYWHERE, DATA, DATA, DATA), (EVERYWHERE, (EVERYWHERE, DATA)))(
            params, h, targets, where
        )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves((value, (dparams, dh))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_device_that_counts_nothing_adds_nothing(dtype, draw):
    h, weight, bias, targets, _ = draw(8, 5, 8)
    h, weight, bias = jnp.asarray(h, dtype), jnp.float32(weight), jnp.float32(bias)
    where = np.arange(8) < 4
    spec = LinearSpec(5)

    def loss(params, h, targets, where):
        return linear_loss(h, *params, targets, where, spec).objective

    one = jax.jit(jax.grad(loss))((weight, bias), h[:4], targets[:4], where[:4])
    grad = _on(2, jax.grad(loss), (EVERYWHERE, DATA, DATA, DATA), EVERYWHERE)
    two = grad((weight, bias), h, targets, where)
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)
