"""Singular values in float64: of a matrix in memory, of a stream of its rows, or estimated through a random sketch."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.linalg import lapack

from headlab.analysis.blocks import Kind, RowBlocks, Seen, float64_blocks, is_array
from headlab.errors import HeadlabError, UsageError

_REFLECTORS = 64  # that LAPACK applies at once
_LEAST_CHUNK = 1024  # rows that are eliminated at once
_PANEL = 4096  # rows of the test matrix that are widened at once


@dataclasses.dataclass(frozen=True)
class Spectrum:
    """Singular values of a matrix, and what a reader must know of it.

    Attributes:
      singular_values: descending, float64. All min(rows, columns) of them; of a sketch its width, or rows if fewer.
      rows, columns: the size of the matrix.
      sketch: the width of the random sketch that they are of; None where they are the matrix's own.
      dtype: the narrowest floating type in which rows came: below float64, rounding noise looks like rank.
      zero_rows: rows that are all zero.
      kind: what the rows are.
      caveats: those of the source.
    """

    singular_values: Float[np.ndarray, "k"]
    rows: int
    columns: int
    sketch: int | None = None
    dtype: str = "float64"
    zero_rows: int = 0
    kind: Kind = "matrix"
    caveats: tuple[str, ...] = ()


def spectrum(
    source: Any, *, sketch: int | None = None, seed: int = 0, kind: Kind | None = None
) -> Spectrum:
    """The singular values σ₁ ≥ σ₂ ≥ … of a matrix, in one pass over its rows.

    In memory they are LAPACK's (gesdd). Of a stream, rows are collected until there are as many as columns; then each
    chunk is eliminated against the triangle R of those before it by Householder reflections (R ← qr([R; chunk])), whose
    singular values are those of all rows: backward stable, as one QR of the whole would be. The stream is held in
    memory as about three matrices [columns, columns], or [rows, columns] where it has fewer rows.

    With `sketch` = k, they are those of A·Ω, with Ω `[columns, k]` normal of variance 1/k (Halko, Martinsson & Tropp
    2011), and memory is 4·columns·k bytes for Ω and a few k². What that can and cannot say:

    * rank(AΩ) = min(rank A, k) with probability one in exact arithmetic. So a numerical rank below k certifies the rank
      of A; a numerical rank of k says only that the rank of A is at least k. Near k the least singular values of the
      sketch shrink: those of a rank-r matrix by about 1 − √(r/k), and further where r = k − 1.
    * singular values are estimates: E[AΩΩᵀAᵀ] = AAᵀ, with a relative error of about √(rank / k).

    Args:
      source: an array, a `RowBlocks`, a function that gives blocks of rows, or an iterable of them.
      sketch: k, 1 … columns; None computes the matrix's own singular values.
      seed: of Ω.
      kind: what the rows are; None takes it from the source, "matrix" where it doesn't say.

    Raises:
      UsageError: the matrix is empty or has NaN or infinite numbers, or k is out of its range.

    >>> spectrum(np.array([[3.0, 0.0], [0.0, -4.0], [0.0, 0.0]])).singular_values.round(12).tolist()
    [4.0, 3.0]
    """
    if sketch is not None and sketch < 1:
        raise UsageError(f"the sketch is {sketch} wide; it must be at least 1")
    seen = Seen()
    blocks = float64_blocks(source, seen)
    if sketch is not None:
        blocks = _sketched(blocks, sketch, seed)
    values = _dense(blocks) if is_array(source) and sketch is None else _streamed(blocks)
    known = source if isinstance(source, RowBlocks) else None
    return Spectrum(
        values,
        seen.rows,
        seen.columns,
        sketch,
        seen.dtype,
        seen.zero_rows,
        kind or (known.kind if known else "matrix"),
        known.caveats if known else (),
    )


def _dense(blocks: Iterator[np.ndarray]) -> np.ndarray:
    (whole,) = blocks
    return np.linalg.svd(whole, compute_uv=False)


def _streamed(blocks: Iterator[np.ndarray]) -> np.ndarray:
    """Singular values of all rows together, holding no more than the triangle and a chunk of rows."""
    triangle: np.ndarray | None = None
    pending: list[np.ndarray] = []
    for block in blocks:
        chunk = max(block.shape[1], _LEAST_CHUNK)
        for start in range(0, len(block), chunk):
            part = block[start : start + chunk]
            # at most a chunk at once: memory doesn't depend on how the stream is cut
            if pending and sum(map(len, pending)) + len(part) > chunk:
                triangle = _eliminated(triangle, pending)
                pending = []
            pending.append(part.copy())  # a source may reuse its array
    if triangle is None and sum(map(len, pending)) <= pending[0].shape[1]:
        return np.linalg.svd(
            np.concatenate(pending), compute_uv=False
        )  # wide: its own size is the least
    triangle = _eliminated(triangle, pending)
    rows = min(triangle.shape)
    return np.linalg.svd(triangle[:rows], compute_uv=False)


def _eliminated(triangle: np.ndarray | None, pending: list[np.ndarray]) -> np.ndarray:
    """R of qr([triangle; pending rows]), upper triangular, `[columns, columns]`."""
    columns = pending[0].shape[1]
    rows = np.empty((sum(map(len, pending)), columns), order="F")
    np.concatenate(pending, out=rows)
    if triangle is None:
        triangle = np.zeros((columns, columns), order="F")
    # the lower part of `triangle` stays zero: it is neither read nor written
    triangle, _, _, info = lapack.dtpqrt(
        0, min(_REFLECTORS, columns), triangle, rows, overwrite_a=1, overwrite_b=1
    )
    if info:
        raise HeadlabError(f"LAPACK's tpqrt refused its argument {-info}")
    return triangle


def _sketched(blocks: Iterator[np.ndarray], width: int, seed: int) -> Iterator[np.ndarray]:
    """The rows of A·Ω; Ω is drawn in float32, to be held once, and multiplied in float64."""
    test: np.ndarray | None = None
    for block in blocks:
        columns = block.shape[1]
        if width > columns:
            raise UsageError(
                f"the sketch is {width} wide and the matrix has {columns} columns; choose a sketch of at most "
                "that, or none"
            )
        if test is None:
            test = np.random.default_rng(seed).standard_normal((columns, width), dtype=np.float32)
        product = np.zeros((len(block), width))
        for first in range(0, columns, _PANEL):
            panel = slice(first, first + _PANEL)
            product += block[:, panel] @ test[panel].astype(np.float64)
        yield product / np.sqrt(width)
