"""Matrices as blocks of rows: what is measured need not fit into memory.

Wherever the analysis takes a matrix, it takes an array of NumPy or JAX, a `RowBlocks`, a function that gives blocks, or
an iterable of them. Blocks are widened to float64 and checked as they pass.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from headlab.errors import UsageError

#: log_probs: rows whose exponentials sum to 1; logits: rows up to a constant each; matrix: anything else
Kind = Literal["matrix", "logits", "log_probs"]
_BLOCK_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class RowBlocks:
    """A matrix `[rows, columns]` that `make()` gives anew, block of rows by block of rows.

    Attributes:
      make: gives the blocks `[some rows, columns]` from the first row on.
      rows, columns: the size of the whole.
      kind: what the rows are.
      caveats: what a reader of any measurement of it must know.
    """

    make: Callable[[], Iterable[Any]]
    rows: int
    columns: int
    kind: Kind = "matrix"
    caveats: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make())


@dataclasses.dataclass
class Seen:
    """What has passed through `float64_blocks`."""

    rows: int = 0
    columns: int = 0
    zero_rows: int = 0
    dtype: str = "float64"  # the narrowest that came


def float64_blocks(source: Any, seen: Seen) -> Iterator[Float[np.ndarray, "rows columns"]]:
    """The blocks of `source` in float64, checked; `seen` is brought up to date before each is given.

    Raises:
      UsageError: a number is NaN or infinite (the message has its row and column), blocks differ in width, a block is
        not a matrix of real numbers, or there is no row or no column at all.
    """
    for given in _blocks(source):
        block = np.asarray(given)
        if block.ndim != 2 or (block.dtype.kind not in "fiub" and not _is_bfloat16(block)):
            raise UsageError(
                f"a block of rows is {block.dtype}{list(block.shape)}; it must be a matrix [rows, columns] of real "
                "numbers"
            )
        if seen.rows and block.shape[1] != seen.columns:
            raise UsageError(
                f"a block of rows has {block.shape[1]} columns, and those before it {seen.columns}; all blocks are of "
                "one matrix"
            )
        if not block.size:
            continue
        if block.dtype.itemsize < 8 and block.dtype.kind not in "iub":
            seen.dtype = block.dtype.name
        block = block.astype(np.float64, copy=False)
        _refuse_not_finite(block, seen.rows)
        seen.rows, seen.columns = seen.rows + block.shape[0], block.shape[1]
        seen.zero_rows += int(np.sum(~block.any(axis=1)))
        yield block
    if not seen.rows:
        raise UsageError("the matrix is empty; it needs at least one row and one column")


def is_array(source: Any) -> bool:
    """Whether `source` is one array, in memory, and no stream."""
    return hasattr(source, "shape") and hasattr(source, "dtype")


def rows_at_once(columns: int) -> int:
    """How many rows of float64 make a block of about 16 MB; at least one."""
    return max(_BLOCK_BYTES // (8 * columns), 1)


def _blocks(source: Any) -> Iterable[Any]:
    if is_array(source):
        return [source]
    return source() if callable(source) else source


def _is_bfloat16(block: np.ndarray) -> bool:
    return block.dtype.name == "bfloat16"


def _refuse_not_finite(block: np.ndarray, before: int) -> None:
    step = rows_at_once(block.shape[1])
    for first in range(0, len(block), step):
        finite = np.isfinite(block[first : first + step])
        if not finite.all():
            row, column = np.argwhere(~finite)[0]
            value = block[first + row, column]
            raise UsageError(
                f"the matrix has {value} in row {before + first + row}, column {column}; its spectrum needs finite "
                "numbers. A log-probability of −inf is a probability of 0 in that precision."
            )
