"""Reachable tokens have witnesses and the rest certificates; both are checked here, and counted by other means."""

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.spatial import ConvexHull

from headlab.analysis.reachability import argmaxable
from headlab.errors import UsageError


def _by_program(weight, bias=None):
    """Which tokens are strictly on top somewhere, each by one program that sees all rivals."""
    vocab = len(weight)
    bias = np.zeros(vocab) if bias is None else bias
    reachable = []
    for i in range(vocab):
        others = np.arange(vocab) != i
        # λ ≥ 0, Σλ = 1, Σλ·w = w_i, Σλ·b ≥ b_i has a solution exactly if i is unreachable
        solved = linprog(
            np.zeros(vocab - 1),
            A_eq=np.vstack([weight[others].T, np.ones(vocab - 1)]),
            b_eq=np.append(weight[i], 1),
            A_ub=-bias[others][None],
            b_ub=[-bias[i]],
            method="highs",
        )
        reachable.append(solved.status == 2)
    return np.array(reachable)


def _check_proofs(found, weight, bias=None):
    bias = np.zeros(len(weight)) if bias is None else bias
    assert not found.undecided.any()
    scores = found.witnesses[found.reachable] @ weight.T + bias
    assert np.array_equal(np.argmax(scores, axis=1), np.flatnonzero(found.reachable))
    assert np.isnan(found.witnesses[~found.reachable]).all()
    assert sorted(found.certificates) == np.flatnonzero(found.unreachable).tolist()
    scale = np.abs(weight).max() + np.abs(bias).max()
    for token, proof in found.certificates.items():
        assert token not in proof.tokens
        assert np.all(proof.weights > 0) and proof.weights.sum() == pytest.approx(1, abs=1e-12)
        combined = proof.weights @ weight[proof.tokens]
        np.testing.assert_allclose(combined, weight[token], atol=1e-8 * scale)
        assert proof.weights @ bias[proof.tokens] >= bias[token] - 1e-8 * scale


def test_in_the_plane_they_are_the_corners_of_the_hull():
    weight = np.random.default_rng(0).standard_normal((60, 2))
    found = argmaxable(weight)
    corners = ConvexHull(weight).vertices
    assert np.flatnonzero(found.reachable).tolist() == sorted(corners)
    _check_proofs(found, weight)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("width", [1, 3, 6])
def test_they_are_those_of_programs_that_see_all_rivals(width, biased):
    rng = np.random.default_rng(width)
    weight = rng.standard_normal((40, width)) + 2.0
    weight[20:] = 2.0 + 0.2 * (weight[20:] - 2.0)  # near the centre, where the hull is
    bias = rng.standard_normal(40) if biased else None
    found = argmaxable(weight, bias)
    assert np.array_equal(found.reachable, _by_program(weight, bias))
    assert found.unreachable.any() and found.reachable.any()
    _check_proofs(found, weight, bias)


def test_planted_tokens_inside_the_hull_are_found_in_a_table_like_a_trained_one():
    rng = np.random.default_rng(3)
    vocab, width, planted = 600, 24, 25
    norms = rng.uniform(0.5, 2, (vocab, 1))
    weight = rng.standard_normal((vocab, width)) * norms + rng.standard_normal(width)
    weight[:planted] = rng.dirichlet(np.ones(8), planted) @ weight[-8:]
    found = argmaxable(weight.astype(np.float32).astype(np.float64))
    assert found.programs < vocab / 2  # the quick directions do most
    planted_exactly = argmaxable(weight)
    assert planted_exactly.unreachable[:planted].all()
    _check_proofs(planted_exactly, weight)


def test_rows_that_tie_cannot_be_on_top():
    weight = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
    found = argmaxable(weight)
    assert found.unreachable.tolist() == [True, True, False, False]
    assert found.certificates[0].tokens.tolist() == [1]


def test_where_all_rows_are_one_everybody_ties():
    assert argmaxable(np.ones((3, 2)), np.ones(3)).unreachable.all()


def test_a_bias_that_is_linear_in_the_rows_hides_nobody():
    """b = W·u is a shift of the states."""
    rng = np.random.default_rng(0)
    weight, shift = rng.standard_normal((30, 3)), rng.standard_normal(3) * 5
    plain, moved = argmaxable(weight), argmaxable(weight, weight @ shift)
    assert np.array_equal(plain.reachable, moved.reachable)
    _check_proofs(moved, weight, weight @ shift)


def test_a_bias_lifts_a_token_out_of_the_hull_or_sinks_it():
    weight = np.array([[1.0], [-1.0], [0.0]])
    assert argmaxable(weight).unreachable.tolist() == [False, False, True]
    assert argmaxable(weight, np.array([0.0, 0.0, 0.5])).reachable.all()
    # far out no bias matters: only the token between the two can sink
    sunk = argmaxable(weight, np.array([-50.0, 3.0, -60.0]))
    assert sunk.reachable.tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("weight", "bias", "said"),
    [
        (np.zeros((1, 3)), None, "V at least 2"),
        (np.zeros(3), None, "must be \\[V, width\\]"),
        (np.ones((4, 2)), np.zeros(3), "the bias is \\[3\\]; it must be \\[4\\]"),
        (np.array([[1.0], [np.nan]]), None, "token 1 is not finite"),
    ],
)
def test_tables_that_are_none_are_refused(weight, bias, said):
    with pytest.raises(UsageError, match=said):
        argmaxable(weight, bias)
