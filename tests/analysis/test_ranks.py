"""Ranks against NumPy's, closed forms of the effective ranks, and the caveats that must be said."""

import math

import numpy as np
import pytest

from headlab.analysis.ranks import rank
from headlab.analysis.spectra import Spectrum, spectrum
from headlab.errors import UsageError


def _of(values, **known):
    return rank(Spectrum(np.array(values, np.float64), 100, 100, **known))


def test_the_rank_is_that_of_numpy_with_its_tolerance():
    rng = np.random.default_rng(0)
    for true in (1, 5, 12):
        matrix = rng.standard_normal((60, true)) @ rng.standard_normal((true, 30))
        found = rank(np.array_split(matrix, 3))
        assert found.rank == np.linalg.matrix_rank(matrix) == true
        eps = np.finfo(np.float64).eps
        assert found.tolerance == pytest.approx(60 * eps * np.linalg.norm(matrix, 2), rel=1e-12)
        assert not found.at_least and found.caveats == ()


def test_equal_singular_values_count_fully_in_every_effective_rank():
    found = _of([3.0] * 7 + [0.0] * 5)
    for value in (found.entropy_rank, found.stable_rank, found.participation_ratio):
        assert value == pytest.approx(7, rel=1e-12)
    assert found.energy_ranks == {0.9: 7, 0.99: 7, 0.999: 7}


def test_effective_ranks_of_two_values_have_their_closed_forms():
    found = _of([4.0, 1.0])
    entropy = -(0.8 * math.log(0.8) + 0.2 * math.log(0.2))
    assert found.entropy_rank == pytest.approx(math.exp(entropy), rel=1e-12)
    assert found.stable_rank == pytest.approx(17 / 16, rel=1e-12)
    assert found.participation_ratio == pytest.approx(289 / 257, rel=1e-12)
    assert found.energy_ranks == {0.9: 1, 0.99: 2, 0.999: 2}


def test_the_largest_gap_implies_the_width_of_the_head():
    values = [50.0, 9.0, 8.0, 7.0, 1e-9, 5e-10]
    assert (_of(values).gap_after, _of(values).hidden_size) == (4, 4)
    assert _of(values, kind="log_probs").hidden_size == 3
    assert _of(values).gap_ratio == pytest.approx(7e9)
    # zeros are no infinite gap
    assert math.isfinite(_of([2.0, 1.0, 0.0, 0.0]).gap_ratio)


def test_caveats_say_when_the_rank_is_only_a_lower_bound():
    rng = np.random.default_rng(0)
    few = rank(rng.standard_normal((5, 9)))
    assert few.rank == 5 and few.at_least and "only 5 rows for 9 columns" in few.caveats[0]
    low = rank(np.outer(np.ones(5), np.ones(9)))
    assert low.rank == 1 and not low.at_least and low.caveats == ()
    full = rank(rng.standard_normal((9, 5)))
    assert full.rank == 5 and not full.at_least
    narrow = rank(rng.standard_normal((20, 9)), sketch=4)
    assert narrow.rank == 4 and narrow.at_least and "may be higher" in narrow.caveats[0]
    certified = rank(np.outer(np.ones(20), np.ones(9)), sketch=4)
    assert certified.rank == 1 and not certified.at_least and "certified" in certified.caveats[0]


def test_caveats_name_zero_rows_and_narrow_types():
    matrix = np.eye(4, dtype=np.float32)
    matrix[3] = 0
    said = " ".join(rank(matrix).caveats)
    assert "1 of 4 rows are zero" in said and "float32" in said


def test_a_matrix_of_zeros_has_rank_zero_everywhere():
    found = rank(np.zeros((3, 3)))
    assert found.rank == 0 and found.entropy_rank == found.stable_rank == 0
    assert found.energy_ranks[0.9] == 0 and found.gap_after is None


def test_a_tolerance_counts_what_exceeds_it_and_has_a_range():
    assert rank(np.diag([3.0, 2.0, 1.0]), 1.5).rank == 2
    for wrong in (-1.0, math.inf, math.nan):
        with pytest.raises(UsageError, match="tolerance"):
            rank(np.eye(2), wrong)
    with pytest.raises(UsageError, match="where it is computed"):
        rank(spectrum(np.eye(2)), sketch=1)
