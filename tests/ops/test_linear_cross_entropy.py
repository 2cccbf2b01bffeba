"""The public loss: its options, reductions and errors, against the dense float64 formula.

Values in float64 are sums of at most some hundred numbers of size 10: rounding leaves about 10⁻¹³.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headlab.ops import linear_cross_entropy

CLOSE = dict(rtol=1e-11, atol=1e-12)


@pytest.fixture
def problem(draw):
    """h [2, 3, 4], weight [8, 4] of 6 tokens, bias, targets and where, both [2, 3]."""
    h, weight, bias, targets, where = draw(6, 6, 8)
    where[:] = [True, False, True, True, True, False]
    return h.reshape(2, 3, 4), weight, bias, targets.reshape(2, 3), where.reshape(2, 3)


OPTIONS = [
    dict(),
    dict(softcap=2.0, logit_scale=1.5),
    dict(label_smoothing=0.2),
    dict(z_loss_weight=0.3),
    dict(softcap=5.0, logit_scale=-0.7, label_smoothing=0.1, z_loss_weight=0.1),
]
BLOCKS = [dict(), dict(token_block=4, vocab_block=3)]


def _expected(dense, problem, options):
    h, weight, bias, targets, where = problem
    names = dict(softcap="softcap", logit_scale="scale", label_smoothing="alpha", z_loss_weight="z")
    return dense(
        h.reshape(-1, 4),
        weight,
        bias,
        targets.reshape(-1),
        where.reshape(-1),
        vocab_size=6,
        **{names[key]: value for key, value in options.items()},
    )


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("options", OPTIONS)
def test_sum_and_mean_equal_the_dense_formula(options, blocks, problem, dense):
    h, weight, bias, targets, where = problem
    expected = _expected(dense, problem, options)

    def loss(h, weight, bias, reduction):
        return linear_cross_entropy(
            h,
            weight,
            targets,
            bias=bias,
            where=where,
            vocab_size=6,
            reduction=reduction,
            **options,
            **blocks,
        )

    grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)), static_argnums=3)
    with jax.enable_x64(True):
        for reduction, count in (("sum", 1), ("mean", 4)):
            value, gradient = grad(h, weight, bias, reduction)
            np.testing.assert_allclose(value, expected.objective / count, **CLOSE)
            for found, wanted in zip(gradient, expected.gradient, strict=True):
                np.testing.assert_allclose(found, wanted.reshape(found.shape) / count, **CLOSE)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("options", OPTIONS)
def test_every_position_and_its_lse_equal_the_dense_formula(options, blocks, problem, dense):
    """reduction="none" with return_lse: both values, and the gradient of a weighted sum of both."""
    h, weight, bias, targets, where = problem
    expected = _expected(dense, problem, options)
    rng = np.random.default_rng(3)
    g_value, g_lse = rng.normal(size=(2, 2, 3))

    def loss(h, weight, bias):
        value, lse = linear_cross_entropy(
            h,
            weight,
            targets,
            bias=bias,
            where=where,
            vocab_size=6,
            reduction="none",
            return_lse=True,
            **options,
            **blocks,
        )
        return jnp.sum(g_value * value) + jnp.sum(g_lse * lse), (value, lse)

    with jax.enable_x64(True):
        grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
        gradient, (value, lse) = grad(h, weight, bias)
    alpha, z = options.get("label_smoothing", 0.0), options.get("z_loss_weight", 0.0)
    each = (1 - alpha) * expected.nll + alpha * expected.uniform_nll + z * expected.lse**2
    np.testing.assert_allclose(value, np.where(where, each.reshape(2, 3), 0), **CLOSE)
    np.testing.assert_allclose(lse, np.where(where, expected.lse.reshape(2, 3), 0), **CLOSE)
    flat_value, flat_lse = g_value.reshape(-1), g_lse.reshape(-1)
    wanted = expected.gradients(
        (1 - alpha) * flat_value, flat_lse + 2 * z * expected.lse * flat_value, alpha * flat_value
    )
    for found, dense_one in zip(gradient, wanted, strict=True):
        np.testing.assert_allclose(found, dense_one.reshape(found.shape), **CLOSE)


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_return_lse_leaves_the_value_alone(reduction, problem):
    h, weight, bias, targets, where = problem
    call = lambda **more: linear_cross_entropy(  # noqa: E731
        h, weight, targets, bias=bias, where=where, vocab_size=6, reduction=reduction, **more
    )
    with jax.enable_x64(True):
        plain, (value, lse) = jax.jit(lambda: (call(), call(return_lse=True)))()
    np.testing.assert_allclose(value, plain, **CLOSE)
    assert lse.shape == targets.shape


def test_the_mean_of_nothing_is_undefined_and_its_gradient_zero(problem):
    h, weight, _, targets, _ = problem

    def mean(h, weight):
        nowhere = np.zeros(targets.shape, bool)
        return linear_cross_entropy(
            jnp.full(h.shape, jnp.nan), weight, targets, where=nowhere, reduction="mean"
        ) + linear_cross_entropy(h, weight, targets, where=nowhere)

    value, gradient = jax.jit(jax.value_and_grad(mean, argnums=(0, 1)))(
        h.astype(np.float32), weight.astype(np.float32)
    )
    assert np.isnan(value)
    assert all(not np.any(g) for g in gradient)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_second_derivatives_equal_those_of_the_dense_formula(reduction, blocks, problem):
    """The Hessian's product with a direction, by reverse over reverse mode."""
    h, weight, _, targets, _ = problem

    def fused(h, weight):
        out = linear_cross_entropy(
            h, weight, targets, softcap=3.0, vocab_size=6, reduction=reduction, **blocks
        )
        return jnp.sum(out**2)

    def plain(h, weight):
        z = 3.0 * jnp.tanh(h @ weight[:6].T / 3.0)
        nll = -jnp.take_along_axis(jax.nn.log_softmax(z), targets[..., None], -1)[..., 0]
        return jnp.sum((jnp.sum(nll) if reduction == "sum" else nll) ** 2)

    rng = np.random.default_rng(0)
    u, v = rng.normal(size=h.shape), rng.normal(size=weight.shape)

    def product(function):
        def slope(h, weight):
            dh, dweight = jax.grad(function, argnums=(0, 1))(h, weight)
            return jnp.sum(dh * u) + jnp.sum(dweight * v)

        return jax.jit(jax.grad(slope, argnums=(0, 1)))(h, weight)

    weight = np.where(np.arange(8)[:, None] < 6, weight, 0)
    with jax.enable_x64(True):
        for found, wanted in zip(product(fused), product(plain), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)


def test_forward_mode_is_refused(problem):
    h, weight, _, targets, _ = problem
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda h: linear_cross_entropy(h, weight, targets), (h,), (h,))


def test_second_derivatives_of_bfloat16_weights_are_refused(problem):
    h, weight, _, targets, _ = problem
    narrow = jnp.asarray(weight, jnp.bfloat16)

    def norm(h):
        dh = jax.grad(lambda h: linear_cross_entropy(h, narrow, targets, vocab_block=3))(h)
        return jnp.sum(dh**2)

    with pytest.raises(TypeError, match="bfloat16; give them in float32"):
        jax.eval_shape(jax.grad(norm), jnp.asarray(h, jnp.float32))


@pytest.mark.parametrize("blocks", BLOCKS)
def test_jit_vmap_and_remat_compose(blocks, problem):
    h, weight, _, targets, where = (
        np.asarray(a, np.float32) if np.asarray(a).dtype == np.float64 else a for a in problem
    )

    def loss(h, targets, where):
        return linear_cross_entropy(h, weight, targets, where=where, **blocks)

    one = jax.jit(jax.grad(loss))
    one_by_one = [one(*a) for a in zip(h, targets, where, strict=True)]
    together = jax.jit(jax.vmap(jax.grad(jax.checkpoint(loss))))(h, targets, where)
    # Two orders of adding up some ten products of numbers below 10, with padding logits of 160 beside them.
    np.testing.assert_allclose(together, np.stack(one_by_one), atol=1e-4)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (dict(h=np.zeros((2, 3, 5), np.float32)), ValueError, r"\(2, 3, 5\).*\(8, 4\)"),
        (dict(weight=np.zeros((8,), np.float32)), ValueError, r"\(2, 3, 4\).*\(8,\)"),
        (dict(weight=np.zeros((0, 4), np.float32)), ValueError, r"\(0, 4\).*at least one"),
        (dict(weight=np.zeros((8, 4), np.int32)), TypeError, "weight is int32"),
        (dict(h=np.zeros((2, 3, 4), np.int32)), TypeError, "h is int32"),
        (dict(targets=np.zeros((2, 4), np.int32)), ValueError, r"\(2, 3, 4\).*\(2, 4\)"),
        (dict(targets=np.zeros((2, 3), np.float32)), TypeError, "targets are float32"),
        (dict(bias=np.zeros((6,), np.float32)), ValueError, r"bias is \(6,\); it must be \(8,\)"),
        (dict(where=np.zeros((2, 3), np.int32)), ValueError, r"int32.*bool"),
        (dict(where=np.zeros((3,), bool)), ValueError, r"bool\(3,\).*\(2, 3\)"),
        (dict(vocab_size=9), ValueError, "vocab_size is 9; weight has 8 rows"),
        (dict(vocab_size=0), ValueError, "vocab_size is 0"),
        (dict(softcap=0.0), ValueError, "softcap is 0.0"),
        (dict(softcap=float("inf")), ValueError, "softcap is inf"),
        (dict(logit_scale=0.0), ValueError, "logit_scale is 0.0"),
        (dict(label_smoothing=1.0), ValueError, "label_smoothing is 1.0"),
        (dict(z_loss_weight=-1.0), ValueError, "z_loss_weight is -1.0"),
        (dict(reduction="average"), ValueError, "reduction is 'average'"),
        (dict(token_block=0), ValueError, "token_block is 0"),
        (dict(vocab_block=-3), ValueError, "vocab_block is -3"),
    ],
)
def test_bad_input_is_refused_by_value(change, error, match):
    arguments = dict(
        h=np.zeros((2, 3, 4), np.float32),
        weight=np.zeros((8, 4), np.float32),
        targets=np.zeros((2, 3), np.int32),
    )
    h, weight, targets, *_ = (arguments | change).values()
    options = {key: value for key, value in change.items() if key not in arguments}
    with pytest.raises(error, match=match):
        linear_cross_entropy(h, weight, targets, **options)


def test_every_combination_of_low_precision_keeps_float32_results(problem):
    h, weight, _bias, targets, where = problem
    for dtypes in itertools.product(("float32", "bfloat16", "float16"), repeat=2):
        narrow_h, narrow_weight = (
            jnp.asarray(a, t) for a, t in zip((h, weight), dtypes, strict=True)
        )

        def loss(h, weight):
            return linear_cross_entropy(h, weight, targets, where=where, vocab_size=6)

        grad = jax.value_and_grad(loss, argnums=(0, 1))
        value, (dh, dweight) = jax.jit(grad)(narrow_h, narrow_weight)
        assert value.dtype == jnp.float32
        assert (dh.dtype, dweight.dtype) == (narrow_h.dtype, narrow_weight.dtype)
