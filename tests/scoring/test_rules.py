"""Decoding rules are exact functions of the distribution: each against its formula in NumPy, a row at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from headlab.errors import UsageError
from headlab.scoring import (
    greedy,
    sample,
    with_min_p,
    with_repetition_penalty,
    with_temperature,
    with_top_k,
    with_top_p,
)

SEEN = np.random.default_rng(5).random((4, 50)) < 0.3


def random_logits(*shape):
    return np.random.default_rng(0).normal(0, 3, shape).astype(np.float32)


def ordered(p):
    return sorted(range(len(p)), key=lambda v: (-p[v], v))


def top_k(p, k):
    kept = set(ordered(p)[:k])
    return [p[v] if v in kept else 0 for v in range(len(p))]


def top_p(p, threshold):
    kept, total = set(), 0.0
    for v in ordered(p):
        if total >= threshold:
            break
        kept.add(v)
        total += p[v]
    return [p[v] if v in kept else 0 for v in range(len(p))]


def min_p(p, threshold):
    return [x if x >= threshold * max(p) else 0 for x in p]


FILTERS = [
    *((with_top_k, top_k, k) for k in (1, 3, 49, 50)),
    *((with_top_p, top_p, p) for p in (1e-6, 0.5, 0.93, 1.0)),
    *((with_min_p, min_p, p) for p in (0.0, 0.05, 0.5, 1.0)),
]


@pytest.mark.parametrize(("rule", "formula", "value"), FILTERS)
def test_a_filter_keeps_what_its_formula_keeps_and_renormalises(rule, formula, value):
    log_probs = log_softmax(random_logits(4, 50), axis=-1)
    found = np.exp(np.asarray(rule(log_probs, value), np.float64))
    for row, given in zip(found, np.exp(log_probs.astype(np.float64)), strict=True):
        kept = np.array(formula(list(given), value))
        np.testing.assert_array_equal(row > 0, kept > 0)
        np.testing.assert_allclose(row, kept / kept.sum(), rtol=1e-5)


def test_equal_tokens_are_kept_by_their_ids():
    log_probs = jnp.log(jnp.array([0.1, 0.3, 0.3, 0.3]))
    np.testing.assert_allclose(np.exp(with_top_k(log_probs, 2)), [0, 0.5, 0.5, 0], rtol=1e-6)
    np.testing.assert_allclose(np.exp(with_top_p(log_probs, 0.5)), [0, 0.5, 0.5, 0], rtol=1e-6)
    np.testing.assert_allclose(np.exp(with_min_p(log_probs, 1.0)), [0, *[1 / 3] * 3], rtol=1e-6)


def test_the_whole_nucleus_keeps_every_token_of_a_large_vocabulary():
    """Float32 sums of 50,000 probabilities reach 1 before the last: none of them may go."""
    log_probs = log_softmax(random_logits(50_000))
    assert np.isfinite(with_top_p(log_probs, 1.0)).all()


@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.5, 40.0])
def test_the_repetition_penalty_raises_seen_probabilities_to_its_power(penalty):
    log_probs = log_softmax(random_logits(4, 50).astype(np.float64), axis=-1)
    found = with_repetition_penalty(log_probs.astype(np.float32), SEEN, penalty)
    expected = np.exp(log_probs) ** np.where(SEEN, penalty, 1)
    expected = np.log(expected / expected.sum(-1, keepdims=True))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert (np.asarray(found)[SEEN] <= log_probs[SEEN] + 1e-5).all() or penalty < 1


def test_rules_follow_one_another_and_never_revive_a_token():
    log_probs = log_softmax(random_logits(4, 50), axis=-1)
    step, dead = log_probs, np.zeros((4, 50), bool)
    for rule in (
        lambda x: with_top_k(x, 20),
        lambda x: with_temperature(x, 3.0),
        lambda x: with_repetition_penalty(x, SEEN, 0.5),
        lambda x: with_top_p(x, 0.8),
        lambda x: with_min_p(x, 0.2),
        lambda x: with_temperature(x, 0.5),
    ):
        step = np.asarray(rule(step))
        assert (np.isneginf(step) >= dead).all()
        dead = np.isneginf(step)
        np.testing.assert_allclose(np.exp(step).sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("rule", "value", "said"),
    [
        (with_top_k, 0, "top_k is 0; it must be in 1 … 3"),
        (with_top_k, 4, "top_k is 4"),
        (with_top_p, 0.0, r"top_p is 0.0; it must be above 0"),
        (with_top_p, 1.1, "top_p is 1.1"),
        (with_top_p, float("nan"), "top_p is nan"),
        (with_min_p, -0.1, r"min_p is -0.1; it must be in \[0, 1\]"),
        (with_min_p, 1.1, "min_p is 1.1"),
        (
            lambda x, p: with_repetition_penalty(x, x == 0, p),
            0,
            "repetition_penalty is 0; it must be positive",
        ),
        (
            lambda x, p: with_repetition_penalty(x, x == 0, p),
            float("inf"),
            "repetition_penalty is inf",
        ),
    ],
)
def test_a_value_out_of_range_is_refused(rule, value, said):
    with pytest.raises(UsageError, match=said):
        rule(jnp.zeros(3), value)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_is_applied_before_normalising(temperature):
    logits = random_logits(4, 50)
    log_probs = log_softmax(logits, axis=-1)
    cooled = np.asarray(with_temperature(log_probs, temperature), np.float64)
    expected = log_softmax(logits.astype(np.float64) / temperature, axis=-1)
    # a handful of float32 roundings, each at most of the size of the largest value
    rounding = 8 * np.finfo(np.float32).eps * np.abs(expected).max()
    np.testing.assert_allclose(cooled, expected, rtol=0, atol=rounding)
    np.testing.assert_allclose(np.exp(cooled).sum(-1), 1, rtol=0, atol=rounding)


@pytest.mark.parametrize("temperature", [0.0, np.finfo(np.float32).tiny])
def test_a_cold_distribution_puts_all_mass_on_the_most_probable_token(temperature):
    log_probs = log_softmax(random_logits(4, 50), axis=-1)
    cold = np.exp(with_temperature(log_probs, temperature))
    np.testing.assert_array_equal(cold, np.eye(50)[log_probs.argmax(-1)])


def test_temperature_0_samples_greedily_and_a_tie_goes_to_the_lowest_id():
    log_probs = jnp.log(jnp.array([[0.1, 0.4, 0.4, 0.1], [0.7, 0.1, 0.1, 0.1]]))
    assert greedy(log_probs).tolist() == [1, 0]
    assert [int(sample(jax.random.key(s), log_probs, 0.0)[0]) for s in range(5)] == [1] * 5
    np.testing.assert_array_equal(np.exp(with_temperature(log_probs, 0.0))[0], [0, 1, 0, 0])


def test_samples_have_the_frequencies_of_the_softmax_at_that_temperature():
    logits, n = random_logits(6) / 2, 40_000
    log_probs = jnp.tile(log_softmax(logits), (n, 1))
    drawn = np.bincount(sample(jax.random.key(1), log_probs, 2.0), minlength=6)
    p = softmax(logits.astype(np.float64) / 2)
    # five standard deviations of a binomial count: a right sampler fails in one seed of a million
    assert (np.abs(drawn - n * p) < 5 * np.sqrt(n * p * (1 - p))).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e30])
def test_a_token_of_probability_0_never_comes_up(temperature):
    log_probs = jnp.tile(jnp.array([-jnp.inf, -jnp.log(2), -jnp.inf, -jnp.log(2)]), (1000, 1))
    assert set(sample(jax.random.key(0), log_probs, temperature).tolist()) <= {1, 3}
    assert float(jnp.exp(with_temperature(log_probs, temperature))[0, 0]) == 0


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf"), 1e39, 1e-40])
@pytest.mark.parametrize("rule", [with_temperature, lambda p, t: sample(jax.random.key(0), p, t)])
def test_a_temperature_that_is_no_temperature_is_refused(rule, temperature):
    with pytest.raises(UsageError, match=r"temperature is .*it must be 0"):
        rule(jnp.zeros(3), temperature)
