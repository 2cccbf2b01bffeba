"""The geometry of output matrices and hidden states: spectra over training, anisotropy, what a head lets through."""

import dataclasses
import os
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from headlab.analysis.blocks import Seen, float64_blocks
from headlab.analysis.matrices import log_prob_matrix
from headlab.analysis.spectra import Spectrum, spectrum
from headlab.analysis.states import token_ids
from headlab.checkpoint_files import saved_checkpoints
from headlab.errors import UsageError
from headlab.heads import Head
from headlab.runs import RunDirectory, restore_model


@dataclasses.dataclass(frozen=True)
class GradientShare:
    """How much of logit gradients a matrix passes back to the states (Godey & Artzi 2026).

    Attributes:
      norm: the mean over positions of ‖P·g‖ / ‖g‖, P projecting onto the span of the matrix's columns.
      energy: Σ‖P·g‖² / Σ‖g‖².
      by_chance: √(width / V), about what a gradient of random direction keeps of its norm.
      positions: how many gradients, those of zero left out.
    """

    norm: float
    energy: float
    by_chance: float
    positions: int


@dataclasses.dataclass(frozen=True)
class Similarity:
    """Two tables of the same tokens beside one another.

    Attributes:
      row_cosines: of each token's two rows, `[V]`; NaN where tables are of different widths or a row is zero.
      principal_cosines: cosines of the principal angles between the spans of the columns, descending.
      cka: linear centred kernel alignment, 0 … 1, 1 where one is a rotation and scaling of the other (Kornblith et al.
        2019).
    """

    row_cosines: Float[np.ndarray, "V"]
    principal_cosines: Float[np.ndarray, "k"]
    cka: float


def output_rows(head: Head, embedding: Any = None) -> Float[np.ndarray, "V width"]:
    """The output matrix of a head in float64, real tokens alone.

    Raises UsageError for a head without one matrix (adaptive, mixtape).
    """
    found = head.output_matrix(embedding)
    if found is None:
        raise UsageError(
            f"{type(head).__name__} has no one output matrix; this is for heads whose logits are products with one"
        )
    return np.asarray(found[0]).astype(np.float64)


def output_spectra(run: RunDirectory | str | os.PathLike[str]) -> dict[int, Spectrum]:
    """The spectrum of the output matrix `[V, width]` at every checkpoint that a run kept, by step.

    Rows are of the checkpoint's own float32, which limits what is seen of small singular values. Raises UsageError
    where there is no run or no checkpoint, and what `output_rows` raises.
    """
    run = run if isinstance(run, RunDirectory) else RunDirectory(run)
    steps = sorted(saved_checkpoints(run.checkpoints_dir))
    if not steps:
        raise UsageError(f"{run.path} has no checkpoints. Train it with `headlab train`.")
    found = {}
    for step in steps:
        model = restore_model(run, step).model
        found[step] = spectrum(output_rows(model.head, model.embedding))
    return found


def anisotropy(states: Any) -> float:
    """The mean cosine of all pairs of different states (Ethayarajh 2019; Godey et al. 2024), in O(n·d).

    With unit states u: (‖Σ u‖² − n) / (n·(n − 1)). 0 for states of random directions, 1 for states of one.

    Args:
      states: `[n, d]`, or a stream of its rows; n at least 2.

    Raises:
      UsageError: fewer than two states, one of norm 0, or numbers that are not finite.

    >>> f"{anisotropy(np.eye(3)):.4f}", f"{anisotropy(np.array([[1.0, 0.0], [1.0, 1.0]])):.4f}"
    ('0.0000', '0.7071')
    """
    seen, total = Seen(), np.zeros(1)
    for block in float64_blocks(states, seen):
        if seen.zero_rows:
            raise UsageError("a state has norm 0, so no direction; leave such states out")
        total = total + (block / np.linalg.norm(block, axis=1, keepdims=True)).sum(axis=0)
    n = seen.rows
    if n < 2:
        raise UsageError(f"there are {n} states; the mean over pairs needs at least 2")
    return float((total @ total - n) / (n * (n - 1)))


def gradient_share(weight: Any, gradients: Any) -> GradientShare:
    """The share of logit gradients `[positions, V]` that a matrix `[V, width]` passes to the states.

    The states' gradient is weightᵀ·g: what of g is orthogonal to the matrix's columns never reaches them.

    Args:
      gradients: rows or a stream of them; for cross-entropy p − [target].

    Raises:
      UsageError: widths do not fit, or all gradients are zero.
    """
    weight = np.asarray(weight).astype(np.float64)
    seen = Seen()
    span = _span(weight)
    shares, kept, total = 0.0, 0.0, 0.0
    for block in float64_blocks(gradients, seen):
        if seen.columns != len(weight):
            raise UsageError(
                f"the gradients have {seen.columns} columns and the weight {len(weight)} rows; both must be V"
            )
        whole = np.sum(block**2, axis=1)
        passed = np.sum((block @ span) ** 2, axis=1)
        moving = whole > 0
        shares += float(np.sum(np.sqrt(passed[moving] / whole[moving])))
        kept, total = kept + float(passed.sum()), total + float(whole.sum())
    positions = seen.rows - seen.zero_rows
    if not positions:
        raise UsageError("all gradients are zero; there is nothing to share")
    chance = float(np.sqrt(span.shape[1] / len(weight)))
    return GradientShare(shares / positions, kept / total, chance, positions)


def head_gradient_share(
    head: Head,
    h: Float[Array, "positions d_model"],
    targets: Int[Array, "positions"],
    *,
    embedding: Any = None,
) -> GradientShare:
    """`gradient_share` of a head's own matrix, for the cross-entropy of `targets`: g = p − [target].

    Raises UsageError for a head without a bound on its rank, whose logits aren't products with one matrix alone, and
    where targets aren't one id of the vocabulary a position.
    """
    weight = output_rows(head, embedding)
    if head.rank_bound() is None:
        raise UsageError(
            f"{type(head).__name__}: {head.rank_reason()}; the gradient of its logits isn't that of one product"
        )
    ids = token_ids(targets, "targets", int(np.prod(h.shape[:-1])), head.vocab_size)

    def gradients():
        first = 0
        for block in log_prob_matrix(head, h, embedding=embedding):
            gradient = np.exp(block)
            own = ids[first : first + len(block)]
            gradient[np.arange(len(block)), own] -= 1
            first += len(block)
            yield gradient

    return gradient_share(weight, gradients)


def table_similarity(one: Any, other: Any) -> Similarity:
    """How alike two tables `[V, width]` of the same tokens are: input and output of an untied model, for one.

    Raises UsageError where the tables have other numbers of tokens, or numbers that are not finite.
    """
    one, other = (np.asarray(table).astype(np.float64) for table in (one, other))
    if one.ndim != 2 or other.ndim != 2 or len(one) != len(other):
        raise UsageError(
            f"the tables are {list(one.shape)} and {list(other.shape)}; both must be [V, width] of the same V"
        )
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        raise UsageError("a table has numbers that are not finite")
    cosines = np.full(len(one), np.nan)
    if one.shape == other.shape:
        norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
        held = norms > 0
        cosines[held] = np.sum(one[held] * other[held], axis=1) / norms[held]
    angles = np.linalg.svd(_span(one).T @ _span(other), compute_uv=False)
    a, b = one - one.mean(axis=0), other - other.mean(axis=0)
    scale = np.linalg.norm(a.T @ a) * np.linalg.norm(b.T @ b)
    cka = float(np.linalg.norm(a.T @ b) ** 2 / scale) if scale > 0 else float("nan")
    return Similarity(cosines, np.minimum(angles, 1), cka)


def _span(table: np.ndarray) -> np.ndarray:
    """An orthonormal basis of the columns."""
    left, values, _ = np.linalg.svd(table, full_matrices=False)
    return left[:, values > max(table.shape) * np.finfo(np.float64).eps * values[0]]
