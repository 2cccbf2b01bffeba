"""Rank and effective ranks of a matrix, read off its singular values, with their tolerance and caveats."""

import dataclasses
from typing import Any

import numpy as np

from headlab.analysis.blocks import Kind
from headlab.analysis.spectra import Spectrum, spectrum
from headlab.errors import UsageError

SHARES = (0.9, 0.99, 0.999)


@dataclasses.dataclass(frozen=True)
class Rank:
    """What the singular values σ of one matrix say of its rank.

    Attributes:
      rank: how many σ exceed `tolerance`.
      tolerance: an absolute one; by default that of `numpy.linalg.matrix_rank`, max(rows, columns)·eps·σ₁.
      at_least: whether `rank` is only a lower bound: more rows, or a wider sketch, might show more.
      entropy_rank: exp(−Σ p ln p) with p = σ/Σσ (Roy & Vetterli 2007).
      stable_rank: Σσ² / σ₁².
      participation_ratio: (Σσ²)² / Σσ⁴.
      energy_ranks: for each share of Σσ², the fewest σ that hold it.
      gap_after: i with the largest σ_i / σ_{i+1}; None for a single σ. Values below eps·σ₁ count as eps·σ₁.
      gap_ratio: that ratio; None for a single σ.
      hidden_size: the width of a linear head that this gap implies (Carlini et al. 2024): `gap_after`, or for
        log-probabilities one less, for the normaliser adds one; a bias adds another, which isn't taken off.
      rows, columns, sketch: of the spectrum.
      caveats: in words; empty where there are none.
    """

    rank: int
    tolerance: float
    at_least: bool
    entropy_rank: float
    stable_rank: float
    participation_ratio: float
    energy_ranks: dict[float, int]
    gap_after: int | None
    gap_ratio: float | None
    hidden_size: int | None
    rows: int
    columns: int
    sketch: int | None
    caveats: tuple[str, ...]


def rank(
    source: Any,
    tolerance: float | None = None,
    *,
    sketch: int | None = None,
    seed: int = 0,
    kind: Kind | None = None,
) -> Rank:
    """`Rank` of a matrix, a stream of its rows, or a `Spectrum`.

    >>> found = rank(np.diag([2.0, 2.0, 0.0]))
    >>> found.rank, round(found.entropy_rank, 6), found.stable_rank, found.energy_ranks[0.9]
    (2, 2.0, 2.0, 2)

    Args:
      source: see `spectrum`; a `Spectrum` is read as it is.
      tolerance: singular values above it count; at least 0 and finite. None: max(rows, columns)·eps·σ₁.
      sketch, seed, kind: see `spectrum`; not together with a `Spectrum`.

    Raises:
      UsageError: the tolerance is negative or not finite; and those of `spectrum`.
    """
    if tolerance is not None and not 0 <= tolerance < float("inf"):
        raise UsageError(f"tolerance is {tolerance}; it must be 0 or more, and finite")
    if isinstance(source, Spectrum):
        if sketch is not None or kind is not None:
            raise UsageError("sketch and kind are of the spectrum: give them where it is computed")
        found = source
    else:
        found = spectrum(source, sketch=sketch, seed=seed, kind=kind)
    values = found.singular_values
    if tolerance is None:
        eps = float(np.finfo(np.float64).eps)
        tolerance = max(found.rows, found.columns) * eps * float(values[0])
    count = int(np.sum(values > tolerance))
    full = count == len(values)
    capped = full and (found.rows < found.columns or found.sketch is not None)
    gap_after, gap_ratio = _gap(values)
    return Rank(
        rank=count,
        tolerance=float(tolerance),
        at_least=capped,
        **_effective(values),
        gap_after=gap_after,
        gap_ratio=gap_ratio,
        hidden_size=None if gap_after is None else gap_after - (found.kind == "log_probs"),
        rows=found.rows,
        columns=found.columns,
        sketch=found.sketch,
        caveats=_caveats(found, count, full),
    )


def _effective(values: np.ndarray) -> dict[str, Any]:
    """The effective ranks, each invariant to the scale of the matrix; 0 for a matrix of zeros."""
    if values[0] == 0:
        return {
            "entropy_rank": 0.0,
            "stable_rank": 0.0,
            "participation_ratio": 0.0,
            "energy_ranks": dict.fromkeys(SHARES, 0),
        }
    scaled = values / values[0]
    share = scaled / scaled.sum()
    share = share[share > 0]
    energy = scaled**2
    held = np.cumsum(energy) / energy.sum()
    return {
        "entropy_rank": float(np.exp(-np.sum(share * np.log(share)))),
        "stable_rank": float(energy.sum()),
        "participation_ratio": float(energy.sum() ** 2 / np.sum(energy**2)),
        # held ends at 1 up to rounding, hence the least of the two
        "energy_ranks": {
            part: min(int(np.searchsorted(held, part)) + 1, len(values)) for part in SHARES
        },
    }


def _gap(values: np.ndarray) -> tuple[int | None, float | None]:
    if len(values) < 2 or values[0] == 0:
        return None, None
    floored = np.maximum(values, np.finfo(np.float64).eps * values[0])
    ratios = floored[:-1] / floored[1:]
    place = int(np.argmax(ratios))
    return place + 1, float(ratios[place])


def _caveats(found: Spectrum, count: int, full: bool) -> tuple[str, ...]:
    said = list(found.caveats)
    if found.sketch is not None:
        certified = (
            f"the rank is at least {count}, and may be higher: widen the sketch"
            if full
            else f"a rank below {found.sketch} is certified with probability one"
        )
        said.append(
            f"a random sketch of width {found.sketch}: {certified}; singular values and effective ranks are estimates"
        )
    elif full and found.rows < found.columns:
        said.append(
            f"only {found.rows:,} rows for {found.columns:,} columns, and all of them independent: the rank is a lower "
            "bound, which more contexts may raise"
        )
    if found.zero_rows:
        said.append(f"{found.zero_rows:,} of {found.rows:,} rows are zero")
    if found.dtype != "float64":
        said.append(
            f"rows came in {found.dtype}: its rounding noise lies above a float64 tolerance and counts as rank"
        )
    return tuple(said)
