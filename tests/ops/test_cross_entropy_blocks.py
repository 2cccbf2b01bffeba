"""The fused cross-entropy equals the dense float64 formula, value and gradient, however it is cut into blocks.

Everything here runs in float64, where a wrong formula cannot hide behind rounding: sums of at most some hundred
numbers of size 10 leave an error of about 100 · 10 · 2⁻⁵³ ≈ 10⁻¹³; padding logits of about 160 are never summed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from traced import largest_array

from headlab.ops import LinearSpec, LogitMap, linear_loss, linear_statistics

CLOSE = dict(rtol=1e-11, atol=1e-12)

# (tokens, vocab_size, rows, token_block, vocab_block)
BLOCKS = [
    (7, 5, 5, None, None),
    (7, 5, 5, 3, 3),  # remainders on both axes
    (7, 5, 5, 2, 2),
    (6, 5, 5, 3, 5),  # no remainder
    (7, 5, 8, 3, 3),  # padding inside the remainder
    (7, 5, 8, None, 8),
    (7, 5, 8, 7, 4),
    (7, 3, 12, 2, 3),  # three blocks of padding only
    (7, 3, 10, 2, 3),  # two blocks and a remainder of padding only
    (5, 7, 7, 2, 4),  # V = 2·block − 1
    (5, 7, 8, 5, 4),
    (5, 9, 9, 4, 4),  # a remainder of one row
    (4, 2, 2, 1, 1),
    (4, 2, 8, 3, None),
    (1, 5, 8, None, 3),
    (1, 2, 2, 8, 8),  # blocks larger than what there is
    (0, 5, 5, None, None),
    (0, 5, 8, 2, 3),
]
OPTIONS = [
    dict(bias=False),
    dict(bias=True, scale=-0.7),
    dict(bias=True, softcap=2.0, scale=1.5, z=0.1, alpha=0.1),
    dict(bias=False, softcap=5.0, alpha=0.3),
]


def _spec(vocab_size, token_block, vocab_block, scale=1.0, softcap=None):
    return LinearSpec(
        vocab_size, LogitMap(scale, softcap), token_block=token_block, vocab_block=vocab_block
    )


def _compare(got, expected):
    for g, e in zip(got, expected, strict=True):
        assert (g is None) == (e is None)
        if g is not None:
            assert g.dtype == np.float64
            np.testing.assert_allclose(g, e, **CLOSE)


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_loss_equals_the_dense_formula(index, draw, dense):
    tokens, vocab_size, rows, token_block, vocab_block = BLOCKS[index]
    options = dict(OPTIONS[index % 4])
    h, weight, bias, targets, where = draw(tokens, vocab_size, rows)
    bias = bias if options.pop("bias") else None
    expected = dense(h, weight, bias, targets, where, vocab_size=vocab_size, **options)
    z, alpha = options.pop("z", 0.0), options.pop("alpha", 0.0)
    spec = _spec(vocab_size, token_block, vocab_block, **options)

    def objective(h, weight, bias):
        sums = linear_loss(
            h, weight, bias, targets, where, spec, z_loss_weight=z, label_smoothing=alpha
        )
        return sums.objective, sums

    with jax.enable_x64(True):
        grad = jax.value_and_grad(objective, argnums=(0, 1, 2), has_aux=True)
        both = jax.jit(lambda *a: (objective(*a)[1], grad(*a)))
        plain, ((_, sums), gradient) = both(h, weight, bias)
    for found in (plain, sums):  # the gradient is made in the forward pass, by another walk
        _compare(found, (expected.objective, expected.nats, expected.weight))
    _compare(gradient, expected.gradient)
    assert not np.any(gradient[1][vocab_size:])
    assert not np.any(gradient[0][~where])


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_statistics_equal_the_dense_formula(index, draw, dense):
    tokens, vocab_size, rows, token_block, vocab_block = BLOCKS[index]
    options = {k: v for k, v in OPTIONS[(index + 1) % 4].items() if k not in ("z", "alpha")}
    h, weight, bias, targets, _ = draw(tokens, vocab_size, rows, seed=index)
    bias = bias if options.pop("bias") else None
    spec = _spec(vocab_size, token_block, vocab_block, **options)
    expected = dense(h, weight, bias, targets, vocab_size=vocab_size, **options)
    cotangents = np.random.default_rng(1).normal(size=(3, tokens))

    def weighted(h, weight, bias):
        s = linear_statistics(h, weight, bias, targets, spec)
        values = (s.nll, s.max + s.log_sum, s.uniform_nll)
        return sum(jnp.sum(g * v) for g, v in zip(cotangents, values, strict=True)), values

    with jax.enable_x64(True):
        grad = jax.jit(jax.grad(weighted, argnums=(0, 1, 2), has_aux=True))
        gradient, values = grad(h, weight, bias)
    _compare(values, (expected.nll, expected.lse, expected.uniform_nll))
    _compare(gradient, expected.gradients(*cotangents))


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_gradients_equal_finite_differences(softcap, draw):
    h, weight, bias, targets, where = draw(7, 6, 8)
    spec = _spec(6, 3, 4, scale=1.3, softcap=softcap)

    def loss(a):
        sums = linear_loss(*a, targets, where, spec, z_loss_weight=0.1, label_smoothing=0.1)
        stats = linear_statistics(*a, targets, spec)
        return sums.objective + jnp.sum(jnp.sin(stats.nll)) + jnp.sum(stats.uniform_nll**2)

    with jax.enable_x64(True):
        point = (h, weight, bias)
        value, gradient = jax.jit(loss), jax.jit(jax.grad(loss))(point)
        for seed in range(5):
            rng = np.random.default_rng(seed)
            direction = [rng.normal(size=a.shape) for a in point]
            step = (
                1e-5  # truncation step² ≈ 1e-10 · third derivative, rounding 1e-15 / step ≈ 1e-10
            )
            ahead, behind = (
                value(tuple(a + s * b for a, b in zip(point, direction, strict=True)))
                for s in (step, -step)
            )
            slope = sum(np.sum(g * b) for g, b in zip(gradient, direction, strict=True))
            np.testing.assert_allclose((ahead - behind) / (2 * step), slope, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_nothing_of_the_size_of_all_logits_is_held(softcap):
    """Also the guard against index arithmetic beyond 2³¹: no array has as many elements as 2³⁴ logits."""
    tokens, rows, d = 1 << 16, 1 << 18, 8
    spec = LinearSpec(rows - 3, LogitMap(1.0, softcap))
    shapes = [
        jax.ShapeDtypeStruct(s, t)
        for s, t in (((tokens, d), "float32"), ((rows, d), "float32"), ((rows,), "float32"))
    ]
    targets = jax.ShapeDtypeStruct((tokens,), "int32")
    where = jax.ShapeDtypeStruct((tokens,), "bool")

    def loss(h, weight, bias, targets, where):
        sums = linear_loss(h, weight, bias, targets, where, spec, z_loss_weight=0.1)
        return sums.objective + jnp.sum(linear_statistics(h, weight, bias, targets, spec).nll)

    largest = largest_array(jax.grad(loss, argnums=(0, 1, 2)), *shapes, targets, where)
    assert largest <= 32 << 20, (
        f"an array of {largest} elements is held; {tokens * rows} logits exist"
    )


@pytest.mark.optimised
def test_the_compiled_loss_needs_less_memory_than_the_logits():
    tokens, rows, d = 4096, 8192, 16
    spec = LinearSpec(rows)
    targets, where = jnp.zeros(tokens, jnp.int32), jnp.ones(tokens, bool)

    def loss(h, weight):
        return linear_loss(h, weight, None, targets, where, spec).objective

    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((tokens, d), (rows, d))]
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < tokens * rows * 4 / 3
