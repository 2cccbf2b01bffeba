"""What sigsoftmax promises beside the contract: its formula, its limits, and a rank that the width does not bound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from headlab import heads
from headlab.embeddings import Table

VOCAB, WIDTH = 11, 6
EPS = float(np.finfo(np.float32).eps)


def _build(**options):
    sizes = dict(vocab_size=VOCAB, d_model=WIDTH, rngs=nnx.Rngs(0), vocab_multiple=8)
    return heads.build("sigsoftmax", **(sizes | options))


_log_probs = nnx.jit(lambda head, h: head.log_probs(h))
_nll = nnx.jit(lambda head, h, ids: head.nll(h, ids))
_loss = nnx.jit(lambda head, h, ids, table: head.loss(h, ids, embedding=table, z_loss_weight=0.1))


def _with_logits(z):
    """A head of one state, h = 1, whose products are z."""
    head = _build(vocab_size=len(z), d_model=1, vocab_multiple=1)
    head.weight[...] = jnp.asarray(z, jnp.float32)[:, None]
    return head, jnp.ones((1, 1))


def test_the_formula_is_that_of_the_paper():
    """exp(z)·σ(z) normalised, in float64; log-probabilities are sums of some ten numbers below 10."""
    rng = np.random.default_rng(0)
    head, h = _build(softcap=5.0, logit_scale=1.5, bias=True), rng.normal(size=(7, WIDTH))
    head.bias[...] = jnp.asarray(rng.normal(size=16), jnp.float32)
    head.weight[...] = head.weight[...] * 8
    weight, bias = (np.asarray(p[...], np.float64)[:VOCAB] for p in (head.weight, head.bias))
    z = 5 * np.tanh(1.5 * (h.astype(np.float32) @ weight.T + bias) / 5)
    p = np.exp(z) / (1 + np.exp(-z))
    p /= p.sum(axis=1, keepdims=True)
    found = _log_probs(head, jnp.asarray(h, jnp.float32))
    np.testing.assert_allclose(found, np.log(p), atol=20 * EPS * 10)


@pytest.mark.parametrize(
    ("z", "gap"),
    [
        ([20.0, 24.0], 4),  # σ is 1: a softmax of z
        ([-20.0, -24.0], -8),  # σ(z) is exp(z): a softmax of 2z
        ([-1000.0, -1030.0], -60),  # where exp(z) and σ(z) are 0 in any format
    ],
)
def test_very_large_and_very_small_logits_keep_their_distance(z, gap):
    head, h = _with_logits(z)
    low, high = np.asarray(_log_probs(head, h))[0]
    np.testing.assert_allclose(high - low, gap, rtol=1e-6)
    nll = _nll(head, jnp.tile(h, (2, 1)), jnp.array([0, 1]))
    np.testing.assert_allclose(nll, [-low, -high], rtol=1e-6)


@pytest.mark.parametrize("z", [-1e8, 1e8])
def test_huge_equal_logits_give_the_log_of_their_count(z):
    head, h = _with_logits([z, z])
    np.testing.assert_allclose(_nll(head, h, jnp.array([1])), np.log(2), rtol=EPS)


def test_the_rank_exceeds_that_of_a_linear_head():
    head = _build(vocab_size=24, init_scale=4.0)
    assert head.rank_bound() is None
    h = np.random.default_rng(0).normal(size=(40, WIDTH))
    log_probs = head.log_probs(h, dtype=np.float64)
    assert np.linalg.matrix_rank(log_probs) > WIDTH + 2


def test_tied_and_untied_with_equal_matrices_give_equal_bits():
    tied, untied = _build(tied=True), _build()
    assert (tied.ties_to, untied.ties_to) == ("table", "nothing")
    assert not jax.tree.leaves(nnx.state(tied))
    table = Table(VOCAB, WIDTH, rngs=nnx.Rngs(1), vocab_multiple=8)
    untied.weight[...] = table.weight[...]
    h = jnp.asarray(np.random.default_rng(0).normal(size=(9, WIDTH)), jnp.float32)
    targets = jnp.arange(9, dtype=jnp.int32)
    for a, b in zip(
        jax.tree.leaves(_loss(tied, h, targets, table)),
        jax.tree.leaves(_loss(untied, h, targets, None)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_the_cost_is_that_of_a_linear_head():
    linear = heads.build("untied", vocab_size=VOCAB, d_model=WIDTH, rngs=nnx.Rngs(0))
    for mode in ("training", "scoring", "decoding"):
        assert _build().cost(mode) == linear.cost(mode)
    with pytest.raises(ValueError, match="'serving'.*'training', 'scoring' or 'decoding'"):
        _build().cost("serving")
