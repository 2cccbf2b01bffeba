"""Singular values of matrices, streams and sketches, against NumPy's of the whole and matrices of known spectrum."""

import itertools
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest

from headlab.analysis.blocks import RowBlocks
from headlab.analysis.spectra import spectrum
from headlab.errors import UsageError

# Both are backward stable: each σ is that of a matrix within a modest multiple of eps·σ₁.
ALIKE = 1e-12


def _known(rows, columns, values, seed=0):
    """A matrix with these singular values."""
    rng = np.random.default_rng(seed)
    left = np.linalg.qr(rng.standard_normal((rows, len(values))))[0]
    right = np.linalg.qr(rng.standard_normal((columns, len(values))))[0]
    return (left * values) @ right.T


def _cut(matrix, sizes):
    edges = np.cumsum([0, *sizes])
    assert edges[-1] == len(matrix)
    return [matrix[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize(
    ("rows", "columns", "sizes"),
    [
        (3000, 7, [1, 1499, 1500]),  # tall, blocks longer and shorter than a chunk
        (2500, 1100, [900, 900, 700]),  # more columns than the least chunk
        (40, 90, [13, 27]),  # wide
        (60, 60, [60]),
    ],
)
def test_a_stream_has_the_singular_values_of_the_whole(rows, columns, sizes):
    matrix = np.random.default_rng(1).standard_normal((rows, columns))
    wanted = np.linalg.svd(matrix, compute_uv=False)
    found = spectrum(iter(_cut(matrix, sizes)))
    assert (found.rows, found.columns) == (rows, columns)
    np.testing.assert_allclose(found.singular_values, wanted, atol=ALIKE * wanted[0], rtol=0)
    np.testing.assert_allclose(spectrum(matrix).singular_values, wanted, rtol=0, atol=0)


def test_small_singular_values_survive_a_stream():
    """A Gram matrix would lose all below 1e-8 of the largest."""
    values = 10.0 ** -np.arange(0, 13)
    matrix = _known(5000, 40, values)
    found = spectrum(lambda: iter(np.array_split(matrix, 9))).singular_values
    np.testing.assert_allclose(found[:13], values, atol=1e-14, rtol=0)
    assert np.all(found[13:] < 1e-14)


def test_float32_and_jax_arrays_are_widened_and_said_to_be_narrow():
    matrix = np.random.default_rng(0).standard_normal((20, 5)).astype(np.float32)
    found = spectrum(jnp.asarray(matrix))
    wanted = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    np.testing.assert_allclose(found.singular_values, wanted, atol=ALIKE * wanted[0], rtol=0)
    assert found.singular_values.dtype == np.float64 and found.dtype == "float32"
    assert spectrum(jnp.asarray(matrix, jnp.bfloat16)).dtype == "bfloat16"


@pytest.mark.parametrize("rank", [1, 17, 31])
def test_a_sketch_finds_every_rank_below_its_width(rank):
    matrix = _known(200, 9000, np.linspace(2, 1, rank))
    found = spectrum(RowBlocks(lambda: np.array_split(matrix, 3), 200, 9000), sketch=32)
    tolerance = 9000 * np.finfo(float).eps * found.singular_values[0]
    assert np.sum(found.singular_values > tolerance) == rank
    assert len(found.singular_values) == 32 and found.sketch == 32


def test_a_sketch_estimates_singular_values():
    values = np.array([8.0, 4.0, 2.0])
    found = spectrum(_known(100, 5000, values), sketch=1000).singular_values
    # a relative error of about √(rank/k), here 0.055
    np.testing.assert_allclose(found[:3], values, rtol=3 * np.sqrt(3 / 1000))


def test_the_same_seed_gives_the_same_sketch():
    matrix = _known(50, 300, np.ones(20))
    first, again, other = (spectrum(matrix, sketch=30, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(first.singular_values, again.singular_values)
    assert not np.array_equal(first.singular_values, other.singular_values)


def test_numbers_that_are_not_finite_are_refused_with_their_place():
    matrix = np.zeros((30, 4))
    matrix[25, 2] = -np.inf
    with pytest.raises(UsageError, match="-inf in row 25, column 2"):
        spectrum(iter(np.array_split(matrix, 4)))


@pytest.mark.parametrize(
    ("source", "sketch", "said"),
    [
        (np.zeros((0, 4)), None, "empty"),
        ([], None, "empty"),
        (np.zeros(4), None, "must be a matrix"),
        (np.array([["a"]]), None, "real"),
        ([np.zeros((2, 3)), np.zeros((2, 4))], None, "4 columns, and those before it 3"),
        (np.ones((5, 4)), 5, "5 wide and the matrix has 4 columns"),
        (np.ones((5, 4)), 0, "at least 1"),
    ],
)
def test_what_has_no_spectrum_is_refused(source, sketch, said):
    with pytest.raises(UsageError, match=said):
        spectrum(source, sketch=sketch)


@pytest.mark.parametrize(
    ("rows", "columns", "sketch", "held"),
    [
        # a triangle and a chunk of 1,024 rows, each twice while it is handed over
        (30_000, 256, None, 8 * (2 * 256 * 256 + 5 * 1024 * 256)),
        # Ω in float32, a panel of it widened, blocks of rows, and the small triangle
        (1_000, 20_000, 64, 4 * 20_000 * 64 + 8 * (4096 * 64 + 4 * 20 * 20_000 + 6 * 1024 * 64)),
    ],
)
def test_a_stream_is_never_held_whole(rows, columns, sketch, held):
    def blocks():
        rng = np.random.default_rng(0)
        for _ in range(0, rows, 20):
            yield rng.standard_normal((20, columns))

    tracemalloc.start()
    try:
        found = spectrum(blocks, sketch=sketch)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.rows == rows and peak < held < 8 * rows * columns / 3
