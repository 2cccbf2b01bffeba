"""Log-probabilities in float64 compile once a structure, and logits are what stands before the one softmax."""

import numpy as np
import pytest
from flax import nnx
from scipy.special import log_softmax

from headlab import heads
from headlab.errors import UsageError
from headlab.heads import float64

VOCAB, WIDTH = 11, 6


def _build(name, seed=0, **options):
    return heads.build(name, vocab_size=VOCAB, d_model=WIDTH, rngs=nnx.Rngs(seed), **options)


def test_heads_of_one_structure_share_a_program_and_keep_their_own_numbers():
    h = np.random.default_rng(0).standard_normal((5, WIDTH))
    first, second = _build("untied"), _build("untied", seed=1)
    first.log_probs(h, dtype=np.float64)
    programs = float64._compiled._cache_size()
    found = second.log_probs(h, dtype=np.float64)
    assert float64._compiled._cache_size() == programs
    wanted = log_softmax(h @ np.asarray(second.weight[...], np.float64).T, axis=1)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-14)
    capped = _build("untied", softcap=2.0)
    wanted = log_softmax(2 * np.tanh(h @ np.asarray(capped.weight[...], np.float64).T / 2), axis=1)
    np.testing.assert_allclose(capped.log_probs(h, dtype=np.float64), wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", ["untied", "mixtape"])
def test_logits_differ_from_log_probabilities_by_a_constant_a_row(kind):
    h = np.random.default_rng(0).standard_normal((2, 3, WIDTH))
    head = _build(kind)
    logits = float64.log_probs_float64(head, h, None, logits=True)
    exact = head.log_probs(h, dtype=np.float64)
    assert logits.shape == (2, 3, VOCAB)
    np.testing.assert_allclose(log_softmax(logits, axis=-1), exact, rtol=0, atol=1e-14)
    assert abs(np.ptp(logits - exact, axis=-1)).max() < 1e-13


def test_logits_of_several_softmaxes_are_refused():
    with pytest.raises(UsageError, match="no one softmax"):
        float64.log_probs_float64(
            _build("mixture_of_softmaxes"), np.ones((1, WIDTH)), None, logits=True
        )


def test_an_output_matrix_is_that_of_the_real_tokens():
    head = _build("untied", vocab_multiple=8, bias=True)
    weight, bias = head.output_matrix()
    assert weight.shape == (VOCAB, WIDTH) and bias.shape == (VOCAB,)
    assert np.array_equal(weight, head.weight[...][:VOCAB])
    assert _build("mixtape").output_matrix() is None
    assert _build("adaptive", cutoffs=(4,)).output_matrix() is None
