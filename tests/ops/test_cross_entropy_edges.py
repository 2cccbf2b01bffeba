"""Small inputs on which other fused losses gave a plausible wrong number."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from headlab.ops import LinearSpec, LogitMap, linear_loss, linear_statistics

EPS = float(jnp.finfo(jnp.float32).eps)
BF16 = 2.0**-8  # unit round-off of bfloat16


def _float32(*arrays):
    return tuple(None if a is None else jnp.asarray(a, jnp.float32) for a in arrays)


@functools.partial(jax.jit, static_argnames=("spec", "z_loss_weight", "label_smoothing"))
def _loss(h, weight, bias, targets, where, spec, **options):
    return linear_loss(h, weight, bias, targets, where, spec, **options).objective


_sums = jax.jit(linear_loss, static_argnames=("spec", "z_loss_weight", "label_smoothing"))
_statistics = jax.jit(linear_statistics, static_argnames="spec")


@functools.partial(jax.jit, static_argnames="spec")
def _nll(h, weight, bias, targets, spec):
    return linear_statistics(h, weight, bias, targets, spec).nll


@functools.cache
def _loss_and_gradients(spec):
    return jax.jit(lambda *arrays: jax.value_and_grad(_loss, argnums=(0, 1, 2))(*arrays, spec))


@pytest.mark.parametrize("vocab_block", [1, 2])
@pytest.mark.parametrize("value", [1e8, -1e8, 3e37])
def test_equal_logits_of_any_size_give_the_log_of_their_count(value, vocab_block):
    h, weight = _float32([[1.0]], [[value], [value]])
    spec = LinearSpec(2, vocab_block=vocab_block)
    targets, where = jnp.zeros(1, jnp.int32), jnp.ones(1, bool)
    stats = _statistics(h, weight, None, targets, spec)
    np.testing.assert_allclose(stats.nll, np.log(2), rtol=2 * EPS)
    np.testing.assert_allclose(stats.uniform_nll, np.log(2), rtol=2 * EPS)
    sums = _sums(h, weight, None, targets, where, spec)
    np.testing.assert_allclose(sums.nats, np.log(2), rtol=2 * EPS)
    dweight = jax.grad(_loss, argnums=1)(h, weight, None, targets, where, spec)
    np.testing.assert_allclose(dweight, [[-0.5], [0.5]], rtol=4 * EPS)


def test_logits_thirty_apart_keep_their_distance():
    h, weight = _float32([[1.0]], [[0.0], [-30.0]])
    nll = _nll(h, weight, None, jnp.ones(1, jnp.int32), LinearSpec(2))
    np.testing.assert_allclose(nll, 30.0, rtol=EPS)  # log1p(e⁻³⁰) ≈ 1e-13


@pytest.mark.parametrize("target", [-1, 5, 7, 8, -100, 2**31 - 1, -(2**31)])
def test_an_id_outside_the_vocabulary_is_nan_where_counted_and_nothing_where_not(
    target, draw, dense
):
    h, weight, bias, targets, _ = draw(4, 5, 8)
    arrays = _float32(h, weight, bias)
    targets[2] = target
    spec = LinearSpec(5, token_block=3, vocab_block=3)
    nll = _nll(*arrays, targets, spec)
    assert np.isnan(nll[2]) and np.isfinite(np.delete(nll, 2)).all()
    everywhere = np.ones(4, bool)
    sums = _sums(*arrays, targets, everywhere, spec)
    assert np.isnan(sums.objective) and np.isnan(sums.nats)
    _, (gradient, *_) = _loss_and_gradients(spec)(*arrays, targets, everywhere)
    assert np.isnan(gradient[2]).all() and np.isfinite(np.delete(gradient, 2, axis=0)).all()

    where = everywhere & (np.arange(4) != 2)
    expected = dense(h, weight, bias, targets, where, vocab_size=5)
    value, gradient = _loss_and_gradients(spec)(*arrays, targets, where)
    np.testing.assert_allclose(value, expected.objective, rtol=32 * EPS)
    for found, wanted in zip(gradient, expected.gradient, strict=True):
        np.testing.assert_allclose(found, wanted, atol=64 * EPS)  # entries of size 1 to 10
    assert not np.any(gradient[0][2])


@jax.jit
def _sums_and_gradients(h, weight, bias, targets, where):
    spec = LinearSpec(5, LogitMap(1.0, 4.0), token_block=2, vocab_block=3)

    def objective(*arrays):
        sums = linear_loss(*arrays, targets, where, spec, z_loss_weight=0.1, label_smoothing=0.1)
        return sums.objective, sums

    return jax.value_and_grad(objective, argnums=(0, 1, 2), has_aux=True)(h, weight, bias)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("all_masked", [True, False])
def test_a_masked_state_contributes_exactly_zero(poison, all_masked, draw):
    h, weight, bias, targets, _ = draw(5, 5, 8)
    where = np.zeros(5, bool) if all_masked else np.array([True, False, True, True, False])
    clean, weight, bias = _float32(np.where(where[:, None], h, 0), weight, bias)
    spoilt = jnp.asarray(np.where(where[:, None], h, poison), jnp.float32)
    targets = np.where(where, targets, -100).astype(np.int32)

    def run(h):
        return jax.tree.leaves(_sums_and_gradients(h, weight, bias, targets, where))

    for found, wanted in zip(run(spoilt), run(clean), strict=True):
        np.testing.assert_array_equal(found, wanted)
        assert not all_masked or not np.any(found)


def test_each_token_gets_its_own_upstream_gradient(draw, dense):
    h, weight, bias, targets, _ = draw(7, 5, 8)
    upstream = np.arange(7.0)
    _, pull = jax.vjp(
        lambda *a: _nll(*a, targets, LinearSpec(5, token_block=3, vocab_block=2)),
        *_float32(h, weight, bias),
    )
    expected = dense(h, weight, bias, targets, vocab_size=5)
    zero = np.zeros(7)
    for found, wanted in zip(
        pull(jnp.asarray(upstream, jnp.float32)),
        expected.gradients(upstream, zero, zero),
        strict=True,
    ):
        np.testing.assert_allclose(found, wanted, atol=64 * EPS * upstream.sum())


def test_the_gradient_is_scaled_by_what_comes_after_the_loss(draw):
    h, weight, bias, targets, where = draw(7, 5, 5)
    arrays, spec = _float32(h, weight, bias), LinearSpec(5)
    _, grad = _loss_and_gradients(spec)(*arrays, targets, where)
    seventh = jax.jit(jax.grad(lambda *a: _loss(*a, targets, where, spec) / 7, argnums=(0, 1, 2)))(
        *arrays
    )
    for whole, part in zip(grad, seventh, strict=True):
        np.testing.assert_allclose(part, whole / 7, rtol=4 * EPS, atol=1e-10)


def test_the_pure_nats_and_the_weight_are_constants(draw):
    h, weight, bias, targets, where = draw(4, 5, 5)
    h, *arrays = _float32(h, weight, bias)
    for field in ("nats", "weight"):
        gradient = jax.jit(
            jax.grad(
                lambda h, field=field: getattr(
                    linear_loss(h, *arrays, targets, where, LinearSpec(5)), field
                )
            )
        )(h)
        assert not np.any(gradient)


def test_z_loss_and_smoothing_leave_the_pure_nats_alone(draw):
    arrays = draw(8, 5, 8)
    h, weight, bias = _float32(*arrays[:3])
    targets, where = arrays[3:]
    pure = _sums(h, weight, bias, targets, where, LinearSpec(5))
    other = _sums(
        h, weight, bias, targets, where, LinearSpec(5), z_loss_weight=0.5, label_smoothing=0.2
    )
    assert pure.nats == other.nats == pure.objective
    assert other.objective != pure.objective


def test_smoothing_spreads_over_real_tokens_only():
    """Uniform logits over V=5 padded to 8: the smoothed loss is ln 5, whatever α; and the formula by hand."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=5)
    weight = np.zeros((8, 5))
    weight[:5] = np.eye(5)
    weight[5:] = 9.0
    alpha, target = 0.1, 3
    q = np.full(5, alpha / 5)
    q[target] += 1 - alpha
    log_p = logits - np.log(np.exp(logits).sum())
    h, weight = _float32(logits[None], weight)
    where, targets = jnp.ones(1, bool), jnp.full(1, target, jnp.int32)
    spec = LinearSpec(5, vocab_block=3)
    value = _loss(h, weight, None, targets, where, spec, label_smoothing=alpha)
    np.testing.assert_allclose(value, -(q @ log_p), rtol=8 * EPS)
    gradient = jax.grad(_loss)(h, weight, None, targets, where, spec, label_smoothing=alpha)
    np.testing.assert_allclose(gradient[0], np.exp(log_p) - q, atol=8 * EPS)
    even = _loss(h * 0, weight, None, targets, where, spec, label_smoothing=alpha)
    np.testing.assert_allclose(even, np.log(5), rtol=4 * EPS)


def test_softcap_saturates_at_its_cap():
    logit_map = LogitMap(1.0, 30.0)
    np.testing.assert_allclose(logit_map(jnp.float32(124.0)), 30 * np.tanh(124 / 30), rtol=4 * EPS)
    h, weight = _float32([[1.0]], [[124.0], [0.0]])
    nll = _nll(h, weight, None, jnp.ones(1, jnp.int32), LinearSpec(2, logit_map))
    np.testing.assert_allclose(nll, 30 * np.tanh(124 / 30), rtol=4 * EPS)


def test_the_map_is_scaled_before_it_is_capped():
    value = LogitMap(2.0, 3.0)(jnp.float32(1.2))
    np.testing.assert_allclose(value, 3 * np.tanh(2 * 1.2 / 3), rtol=4 * EPS)


def test_the_true_class_gradient_survives_bfloat16_near_certainty(dense):
    """At 1 − p ≈ 1e-3, p − 1 in bfloat16 would be 0 or 4e-3; here only the finished difference is rounded."""
    h = np.array([[8.0, 1.0]])
    weight = np.array([[1.0, 0.0], [0.0, 0.5], [0.0, 0.25], [0.125, 0.0]])
    targets, where = np.zeros(1, np.int32), np.ones(1, bool)
    expected = dense(h, weight, None, targets, vocab_size=4)
    assert 1e-4 < 1 - expected.probabilities[0, 0] < 2e-3
    for dtype in (jnp.bfloat16, jnp.float32):
        dh, dweight = jax.grad(_loss, argnums=(0, 1))(
            jnp.asarray(h, dtype),
            jnp.asarray(weight, jnp.float32),
            None,
            targets,
            where,
            LinearSpec(4),
        )
        # dz and dh are each rounded to bfloat16 once; in float32 1 − p keeps 1e-3 / EPS ≈ 13 bits.
        np.testing.assert_allclose(dweight[0], expected.gradient[1][0], rtol=1.5 * BF16)
        np.testing.assert_allclose(
            np.asarray(dh, np.float64), expected.gradient[0], rtol=3 * BF16, atol=1e-6
        )


@pytest.mark.parametrize("vocab_block", [None, 4096])
def test_bfloat16_states_over_fifty_thousand_tokens(vocab_block, dense):
    """Logits are accumulated and normalised in float32: value within 1e-2, gradient norm within 2e-2 of float64."""
    tokens, vocab_size, d = 32, 50_000, 48
    rng = np.random.default_rng(0)
    h = rng.normal(size=(tokens, d))
    weight = rng.normal(size=(vocab_size, d)) / np.sqrt(d) * 2
    targets, where = rng.integers(0, vocab_size, tokens).astype(np.int32), np.ones(tokens, bool)
    expected = dense(h, weight, None, targets, vocab_size=vocab_size)
    spec = LinearSpec(vocab_size, token_block=24, vocab_block=vocab_block)
    grad = jax.jit(
        jax.value_and_grad(lambda h, w: _loss(h, w, None, targets, where, spec), argnums=(0, 1))
    )
    value, gradient = grad(jnp.asarray(h, jnp.bfloat16), jnp.asarray(weight, jnp.float32))
    assert value.dtype == jnp.float32
    assert [g.dtype for g in gradient] == [jnp.bfloat16, jnp.float32]
    assert abs(float(value) - expected.objective) < 1e-2 * expected.objective
    for found, wanted in zip(gradient, expected.gradient, strict=False):
        error = np.linalg.norm(np.asarray(found, np.float64) - wanted)
        assert error < 2e-2 * np.linalg.norm(wanted)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_bfloat16_logits_quantise_the_products_alone(state_dtype, dense, draw):
    """Each product is rounded once (2⁻⁸ relative); the statistics behind it are float32."""
    h, weight, bias, targets, _ = draw(6, 5, 8)
    h, weight = (a.astype(ml_dtypes.bfloat16).astype(np.float64) for a in (h, weight))
    products = (h @ weight[:5].T).astype(ml_dtypes.bfloat16).astype(np.float64)
    # The rounded products, as the logits of an identity: the reference that quantises like this and nowhere else.
    expected = dense(products, np.eye(5), bias[:5], targets, vocab_size=5)
    spec = LinearSpec(5, logits_dtype="bfloat16")
    stats = _statistics(jnp.asarray(h, state_dtype), *_float32(weight, bias), targets, spec)
    assert stats.nll.dtype == jnp.float32
    # A product that lies on a rounding boundary may round either way: one unit of the largest product.
    close = 2 * BF16 * np.abs(products).max()
    np.testing.assert_allclose(stats.nll, expected.nll, atol=close)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_low_precision_agrees_with_float64(dtype, softcap, draw, dense):
    """Inputs are representable in bfloat16, so products are exact and values are as good as in float32.

    Values: d products and their sum, each EPS of Σ|h·w| < 30. Gradients: dz and the result are rounded to the dtype of
    h once each, relative to the norm.
    """
    h, weight, bias, targets, where = draw(9, 7, 8)
    h, weight, bias = (a.astype(ml_dtypes.bfloat16).astype(np.float64) for a in (h, weight, bias))
    options = dict(softcap=softcap, z=0.01, alpha=0.1)
    expected = dense(h, weight, bias, targets, where, vocab_size=7, **options)
    spec = LinearSpec(7, LogitMap(1.0, softcap), token_block=4, vocab_block=3)

    def objective(*arrays):
        return _loss(*arrays, targets, where, spec, z_loss_weight=0.01, label_smoothing=0.1)

    value, gradient = jax.jit(jax.value_and_grad(objective, argnums=(0, 1, 2)))(
        jnp.asarray(h, dtype), *_float32(weight, bias)
    )
    np.testing.assert_allclose(value, expected.objective, rtol=8 * EPS * 30)
    unit = EPS * 30 if dtype == "float32" else 2 * BF16
    for found, wanted in zip(gradient, expected.gradient, strict=True):
        error = np.linalg.norm(np.asarray(found, np.float64) - wanted)
        assert error < 2 * unit * np.linalg.norm(wanted)


@pytest.mark.parametrize("target", [0, 4, 5, 9, 10])
def test_first_and_last_row_of_every_block_can_be_the_target(target, draw, dense):
    h, weight, bias, targets, _ = draw(3, 11, 15)
    targets[:] = target
    expected = dense(h, weight, bias, targets, vocab_size=11)
    nll = _nll(*_float32(h, weight, bias), targets, LinearSpec(11, vocab_block=5))
    np.testing.assert_allclose(nll, expected.nll, rtol=32 * EPS, atol=32 * EPS)


def test_small_logits_over_padding_give_the_log_of_the_real_size():
    h, weight = _float32(np.full((1, 2), 1e-4), np.full((8, 2), 1e-4))
    nll = _nll(h, weight, None, jnp.zeros(1, jnp.int32), LinearSpec(5))
    np.testing.assert_allclose(nll, np.log(5), rtol=4 * EPS)
