"""Distributions of known rank are fitted at that width and no narrower; bounds are on their side of the attained."""

import numpy as np
import pytest
from flax import nnx
from scipy.special import log_softmax

from headlab import heads
from headlab.analysis.bottleneck import _bound, bottleneck_gap, fit_head
from headlab.errors import UsageError

CONTEXTS, VOCAB, RANK = 40, 16, 4


@pytest.fixture(scope="module")
def log_p():
    """Row-centred log P has rank 4: rows of W are centred over tokens."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((VOCAB, RANK))
    weight -= weight.mean(axis=0)
    return log_softmax(rng.standard_normal((CONTEXTS, RANK)) @ weight.T, axis=1)


@pytest.fixture(scope="module")
def gaps(log_p):
    return {width: bottleneck_gap(log_p, width, restarts=2) for width in (3, 4)}


def test_a_width_of_the_rank_fits_exactly_and_one_less_does_not(gaps):
    assert gaps[4].centred_rank == gaps[3].centred_rank == RANK
    assert gaps[4].fit.excess < 1e-6 and gaps[4].spectral_fit < 1e-12
    assert gaps[4].lower_bound < 1e-12 and gaps[4].estimate < 1e-12
    assert gaps[3].fit.excess > 0.02 and gaps[3].fit.agreement < 1e-4


def test_what_is_attained_lies_between_the_bound_and_the_spectral_fit(gaps):
    gap = gaps[3]
    assert 0 < gap.lower_bound < gap.fit.excess <= gap.spectral_fit
    assert gap.difference == gap.fit.excess - gap.lower_bound
    assert gap.fit.excess == min(gap.fit.restarts) and len(gap.fit.restarts) == 3
    assert gap.spectral_fit / 3 < gap.estimate < gap.spectral_fit * 3


@pytest.mark.parametrize("spread", [0.01, 0.3, 3.0])
def test_the_lower_bound_holds_for_every_deviation(spread):
    """KL of p and a q that is off by δ, against g(‖δ‖²) for random p and δ."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        log_p = log_softmax(rng.standard_normal(6))
        deviation = rng.standard_normal(6) * spread
        deviation -= deviation.mean()
        kl = np.sum(np.exp(log_p) * (log_p - log_softmax(log_p + deviation)))
        assert kl >= _bound(float(deviation @ deviation), float(np.exp(log_p).min())) - 1e-15


def test_the_bound_is_near_for_small_deviations_of_uniform_distributions():
    """KL → ½·‖δ‖²/V."""
    assert _bound(1e-8, 1 / 6) == pytest.approx(1e-8 / 12, rel=1e-3)
    assert _bound(0.5 - 1e-12, 0.1) == pytest.approx(_bound(0.5 + 1e-12, 0.1), rel=1e-9)


@pytest.mark.parametrize(
    "name", ["mixture_of_softmaxes", "sigsoftmax", "tied", "mixture_of_contexts"]
)
def test_any_head_is_fitted(log_p, name):
    def build(seed):
        given = dict(vocab_size=VOCAB, d_model=3, init_scale=1.0)
        embedding = heads.get(name).input_embedding(rngs=nnx.Rngs(seed), **given)
        return heads.build(name, rngs=nnx.Rngs(seed), **given), embedding

    rough = fit_head(log_p, build, restarts=1, iterations=2)
    fit = fit_head(log_p, build, restarts=1, iterations=150)
    assert 0 < fit.excess < rough.excess / 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (np.zeros((2, 3)), "logsumexp of 1.1"),
        (np.array([[-1.0, -1.0], [0.0, -np.inf]]), "row 1, token 1 is -inf"),
        (np.zeros(3), "must be \\[contexts, V\\]"),
    ],
)
def test_what_are_no_distributions_is_refused(wrong, said):
    with pytest.raises(UsageError, match=said):
        bottleneck_gap(wrong, 1)


def test_widths_and_counts_have_a_range(log_p):
    with pytest.raises(UsageError, match="width is 17"):
        bottleneck_gap(log_p, 17)
    with pytest.raises(UsageError, match="restarts is 0"):
        bottleneck_gap(log_p, 2, restarts=0)


def test_the_lower_bound_is_the_theorems_and_of_one_context():
    logits = 0.5 * np.random.default_rng(5).standard_normal((6, 4))
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    centred = log_p - log_p.mean(axis=1, keepdims=True)
    left = float(np.sum(np.linalg.eigvalsh(centred.T @ centred)[:-2]))  # Σ σ² beyond the second
    assert 0.005 < left < 0.5
    expected = np.exp(log_p).min() / 2 * left * np.exp(-np.sqrt(2 * left)) / 6
    found = bottleneck_gap(log_p, 2, restarts=1, iterations=5)
    np.testing.assert_allclose(found.lower_bound, expected, rtol=1e-9)
    assert found.lower_bound <= found.spectral_fit
