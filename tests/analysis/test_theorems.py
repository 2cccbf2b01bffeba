"""Every head keeps to its theorem on random parameters, reaches it, and says why; rounding is told from rank."""

import numpy as np
import pytest
from flax import nnx

from headlab import heads
from headlab.analysis.matrices import log_prob_matrix
from headlab.analysis.ranks import rank
from headlab.analysis.theorems import check_bound, theory
from headlab.errors import UsageError

V = 257
SPECIAL = {"adaptive": dict(cutoffs=(60, 150), div_value=2.0), "mixtape": dict(n_experts=2)}


def _build(name, vocab=V, width=8, **options):
    given = dict(
        vocab_size=vocab, d_model=width, token_counts=np.arange(vocab, 0, -1), **options
    ) | SPECIAL.get(name, {})
    head = heads.build(name, rngs=nnx.Rngs(0), **given)
    return head, heads.get(name).input_embedding(rngs=nnx.Rngs(1), **given)


CASES = [(name, V, 8, {}) for name in heads.names()] + [
    ("untied", V, 64, dict(bias=True)),
    ("adaptive", V, 64, dict(head_bias=True)),
    ("mixture_of_softmaxes", V, 8, dict(n_experts=1)),
    ("mixture_of_contexts", V, 64, dict(d_latent=20, bias=True)),
    ("low_rank", V, 64, dict(rank=5)),
    *(
        pytest.param(name, vocab, width, {}, marks=pytest.mark.full)
        for name in heads.names()
        for vocab, width in ((V, 64), (2048, 8), (2048, 64))
    ),
]


@pytest.mark.parametrize(("name", "vocab", "width", "options"), CASES)
def test_random_parameters_reach_the_bound_and_never_more(name, vocab, width, options):
    head, embedding = _build(name, vocab, width, **options)
    found = check_bound(head, embedding=embedding)
    assert found.measured.rank == (head.rank_bound() or vocab) == found.expected
    assert found.verdict == "equal" and not found.measured.caveats
    assert found.theory.reason  # words for every registered head


def test_a_small_scale_is_said_to_hide_directions_of_a_mixture():
    head, _ = _build("mixture_of_softmaxes")
    found = check_bound(head, scale=1e-3)
    assert found.measured.rank < V and found.verdict == "below"
    assert "scale 0.001" in found.explanation


def test_too_few_contexts_give_a_lower_bound_that_is_said():
    head, _ = _build("mixture_of_softmaxes")
    found = check_bound(head, contexts=40)
    assert found.measured.rank == 40 and found.measured.at_least
    assert (
        "only 40 rows" in found.measured.caveats[0] and "as many as contexts" in found.explanation
    )


def test_a_bound_that_does_not_hold_is_called_broken():
    head, _ = _build("sigsoftmax", vocab=40)
    head.rank_bound = lambda: 9
    assert check_bound(head).verdict == "broken"


def test_a_new_head_says_what_its_bound_says_until_it_brings_words():
    class New(heads.Head):
        def rank_bound(self):
            """Three, for a reason."""
            return 3

    assert theory_reason(New) == "Three, for a reason."


def theory_reason(cls):
    return cls.rank_reason(cls.__new__(cls))


def test_rounding_to_float32_inflates_the_rank_that_is_d_plus_1():
    head, _ = _build("untied", init_scale=1.0)
    h = np.random.default_rng(0).standard_normal((V + 40, 8))
    exact = rank(log_prob_matrix(head, h))
    rounded = rank(log_prob_matrix(head, h, np.float32))
    assert exact.rank == exact.hidden_size + 1 == 9
    assert rounded.rank == V and "float32" in rounded.caveats[0]
    assert rounded.gap_after == 9  # the gap still shows the width


def test_rows_are_those_of_the_head_whatever_the_blocks(monkeypatch):
    head, embedding = _build("tied", vocab=11, width=6)
    h = np.random.default_rng(0).standard_normal((2, 5, 6))
    wanted = head.log_probs(h, embedding=embedding, dtype=np.float64).reshape(10, 11)
    monkeypatch.setattr("headlab.analysis.matrices.rows_at_once", lambda columns: 4)
    matrix = log_prob_matrix(head, h, embedding=embedding)
    blocks = list(matrix)
    assert [len(block) for block in blocks] == [4, 4, 2]
    assert matrix.rows == 10 and matrix.columns == 11 and blocks[0].dtype == np.float64
    np.testing.assert_allclose(np.concatenate(blocks), wanted, rtol=0, atol=1e-14)


def test_logits_lack_the_dimension_of_the_normaliser():
    head, _ = _build("untied", vocab=30, width=6, init_scale=1.0)
    h = np.random.default_rng(0).standard_normal((40, 6))
    logits = log_prob_matrix(head, h, kind="logits")
    wanted = h @ np.asarray(head.weight[...], np.float64).T
    np.testing.assert_allclose(np.concatenate(list(logits)), wanted, rtol=0, atol=1e-13)
    assert rank(logits).rank == 6 == rank(logits).hidden_size


@pytest.mark.parametrize("name", ["mixture_of_softmaxes", "adaptive"])
def test_logits_of_several_softmaxes_are_refused(name):
    head, _ = _build(name, vocab=200)
    with pytest.raises(UsageError, match="no one softmax"):
        list(log_prob_matrix(head, np.zeros((2, 8)), kind="logits"))


def test_logits_rounded_to_bfloat16_are_a_caveat():
    head, _ = _build("untied", logits_dtype="bfloat16")
    assert "bfloat16" in log_prob_matrix(head, np.zeros((1, 8))).caveats[0]


def test_arguments_out_of_range_are_refused():
    head, _ = _build("untied")
    with pytest.raises(UsageError, match=r"states \[\.\.\., 8\]"):
        log_prob_matrix(head, np.zeros((3, 7)))
    with pytest.raises(UsageError, match="kind"):
        log_prob_matrix(head, np.zeros((3, 8)), kind="odds")
    with pytest.raises(UsageError, match="contexts is 0"):
        check_bound(head, contexts=0)
    with pytest.raises(UsageError, match="scale is"):
        check_bound(head, scale=0.0)
    assert theory(head).bound == 9
