"""Promises about gradients that every registered head keeps, against dense float64 ones and finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest


def _compare(problem, contract, found, wanted):
    for f, w in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        difference, norm = contract.error(f, w)
        close = (
            problem.gradient_tolerance * norm + 1e-14
        )  # of an exact zero, float64 leaves a rounding
        assert difference <= close, (f.shape, difference / norm)


def test_loss_gradients_equal_those_of_the_dense_formula(problem, contract):
    """In the states, the table and every own parameter; padding rows and uncounted positions get exactly nothing."""
    share, upstream = 1 / 7, np.zeros(contract.batch, np.float32)
    arguments = (problem.targets, problem.where, share, upstream)
    _, found = problem.step(problem.params, problem.h, *arguments)
    _compare(problem, contract, found, problem.dense_gradient(share, upstream))
    params, dh = found
    assert dh.dtype == problem.h.dtype
    assert not np.any(np.asarray(dh, np.float32)[~problem.where])
    for leaf, (path, ids) in zip(jax.tree.leaves(params), problem.token_rows(), strict=True):
        assert leaf.dtype == jnp.float32
        assert ids is None or not np.any(leaf[len(ids) :]), path


def test_nll_gradients_follow_each_positions_cotangent(problem, contract):
    upstream = np.arange(problem.where.size, dtype=np.float32).reshape(contract.batch)
    arguments = (problem.targets, problem.where, 0.0, upstream)
    _, found = problem.step(problem.params, problem.h, *arguments)
    _compare(problem, contract, found, problem.dense_gradient(0.0, upstream))


@pytest.mark.quick()
@pytest.mark.in_turn(("loaded",), [(True,), (False,)])
def test_float64_gradients_equal_dense_ones_and_finite_differences(name, loaded, make, contract):
    problem = make(contract.case_of(name, "float32" if loaded else "bfloat16"))
    upstream = np.linspace(-1, 1, problem.where.size).reshape(contract.batch)
    wanted = problem.dense_gradient(1.0, upstream)
    with jax.enable_x64(True):
        point = problem.wide(problem.params, problem.h)

        @jax.jit
        def step(params, h):
            (loss, nll), gradient = problem.step(
                params, h, problem.targets, problem.where, 1.0, upstream
            )
            return loss.objective + jnp.sum(upstream * nll), gradient

        _, gradient = step(*point)
        for found, dense in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
            assert found.dtype == np.float64
            np.testing.assert_allclose(found, dense, rtol=0, atol=1e-11)  # entries below 100
        rng = np.random.default_rng(0)
        direction = jax.tree.map(lambda a: rng.normal(size=a.shape), point)
        # Truncation step² · third derivative, rounding 100 · 2⁻⁵³ / step: both about 1e-8 of slopes of size 10 to 100.
        size = 1e-5
        ahead, behind = (
            step(*jax.tree.map(lambda a, b, s=s: a + s * b, point, direction))[0]
            for s in (size, -size)
        )
        slopes = jax.tree.map(lambda g, b: np.sum(g * b), gradient, direction)
        slope = sum(jax.tree.leaves(slopes))
        np.testing.assert_allclose((ahead - behind) / (2 * size), slope, rtol=1e-6, atol=1e-6)


def test_uncounted_positions_contribute_exactly_zero(problem):
    """Whatever their state and id: the same bits as with harmless ones, and a gradient of zero."""
    where, upstream = problem.where, np.ones(problem.where.shape, np.float32)
    clean = jnp.where(where[..., None], problem.h, 0)
    ids = np.where(where, problem.targets, 0).astype(np.int32)
    wanted = problem.step(problem.params, clean, ids, where, 1.0, upstream)
    for poison, unknown in ((np.nan, -100), (np.inf, -1), (-np.inf, 11), (1e30, 2**31 - 1)):
        spoilt = jnp.where(where[..., None], problem.h, poison).astype(problem.h.dtype)
        ids = np.where(where, problem.targets, unknown).astype(np.int32)
        found = problem.step(problem.params, spoilt, ids, where, 1.0, upstream)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(a, b)
        (_, nll), (_, dh) = found
        assert not np.any(nll[~where]) and not np.any(np.asarray(dh, np.float32)[~where])


@pytest.mark.in_turn(("dtype",), [("bfloat16",), ("float32",)])
def test_nothing_counted_gives_zero_and_no_nan(name, dtype, make, contract):
    problem = make(contract.case_of(name, dtype))
    h, nothing = jnp.full_like(problem.h, jnp.nan), np.zeros(contract.batch, bool)
    upstream = np.ones(contract.batch, np.float32)
    for leaf in jax.tree.leaves(
        problem.step(problem.params, h, problem.targets, nothing, 1.0, upstream)
    ):
        assert not np.any(np.asarray(leaf, np.float32))


@pytest.mark.quick()
def test_sums_of_unequal_micro_batches_add_up(name, make, contract):
    """One and seven counted tokens: Σ nats and Σ z-loss over eight, not a mean of two means."""
    problem = make(contract.loaded_case(name))
    h, targets = problem.h.reshape(-1, contract.width)[:8], problem.targets.reshape(-1)[:8]

    @jax.jit
    def run(h, targets):
        return problem.call("loss", problem.params, h, targets, z_loss_weight=0.1)

    whole, first, rest = (run(h[part], targets[part]) for part in np.s_[:8, :1, 1:8])
    assert (whole.weight, first.weight, rest.weight) == (8, 1, 7)
    for field in ("objective", "nats"):
        total = getattr(first, field) + getattr(rest, field)
        np.testing.assert_allclose(total, getattr(whole, field), rtol=8 * contract.eps)


def test_only_the_own_position_has_a_gradient(problem, contract):
    own = np.zeros(contract.batch, bool)
    own[1, 3] = True
    everywhere = np.ones(contract.batch, bool)
    arguments = (problem.targets, everywhere, 0.0, own.astype(np.float32))
    _, (_, dh) = problem.step(problem.params, problem.h, *arguments)
    dh = np.asarray(dh, np.float32)
    assert np.all(dh[own] != 0) and not np.any(dh[~own])


@pytest.mark.quick()
def test_jit_grad_vmap_and_remat_compose(name, make, contract):
    """Gradients of each sequence, mapped and rematerialised, are those of all sequences together."""
    problem = make(contract.loaded_case(name))
    upstream = np.linspace(-1, 1, problem.where.size).reshape(contract.batch)
    upstream = jnp.asarray(upstream, jnp.float32)

    def loss(params, h, targets, where, upstream):
        regularised = dict(z_loss_weight=problem.z, label_smoothing=problem.alpha)
        out = problem.call("loss", params, h, targets, where=where, **regularised)
        nll = problem.call("nll", params, h, targets, where=where)
        return 0.5 * out.objective + jnp.sum(upstream * nll)

    grad = jax.grad(jax.checkpoint(loss), argnums=(0, 1))
    arrays = (problem.h, jnp.asarray(problem.targets), jnp.asarray(problem.where), upstream)
    params, dh = jax.jit(jax.vmap(grad, in_axes=(None, 0, 0, 0, 0)))(problem.params, *arrays)
    arguments = (problem.targets, problem.where, 0.5, upstream)
    _, wanted = problem.step(problem.params, problem.h, *arguments)
    together = (jax.tree.map(lambda a: jnp.sum(a, axis=0), params), dh)
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(wanted), strict=True):
        difference, norm = contract.error(a, b)
        assert difference <= 2 * problem.gradient_tolerance * norm


@pytest.mark.quick()
def test_the_entropy_has_the_gradient_of_the_dense_formula(name, make, contract):
    problem = make(contract.loaded_case(name))

    def dense(h):
        log_probs, _ = problem.dense(problem.wide(problem.params)[0], h)
        return -jnp.sum(jnp.exp(log_probs) * log_probs)

    found = jax.jit(jax.grad(lambda h: jnp.sum(problem.call("entropy", problem.params, h))))(
        problem.h
    )
    with jax.enable_x64(True):
        wanted = jax.jit(jax.grad(dense))(problem.wide(problem.h)[0])
        difference, norm = contract.error(found, wanted)
    assert difference <= 4 * problem.gradient_tolerance * norm
