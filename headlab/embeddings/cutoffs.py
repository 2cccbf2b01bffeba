"""Where an adaptive softmax and an adaptive embedding cut the vocabulary, and the order of tokens that they cut.

Tokens are ordered by descending count; cutoffs c_1 < … < c_J cut them into the J + 1 bands [0, c_1), [c_1, c_2), …,
[c_J, V). Grave et al. 2017, "Efficient softmax approximation for GPUs".
"""

import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np

Cutoffs = tuple[int, ...] | Literal["auto"]

# The cost model of `choose_cutoffs`, in logits (the time of one logit of one token is 1).
_BATCH = 4096  # B, tokens of a step
_CALL = (
    1 << 21
)  # c, what a product costs beside its logits: high, so that small vocabularies get few bands
_LEAST = 1 << 17  # k₀·B₀, logits below which a product takes no less time
_MOST_TAILS = 4  # "a small number of clusters, 2 to 5" keeps nearly all of the gain
_WORTH = 0.95  # a further tail must save a twentieth: its tokens pay with a narrower representation


def check_cutoffs(cutoffs: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """The cutoffs as a tuple; ValueError unless they ascend strictly inside 1 … vocab_size − 1. None: one band."""
    found = tuple(cutoffs)
    for c in found:
        if isinstance(c, bool) or not isinstance(c, int | np.integer):
            raise ValueError(f"cutoffs are {found}; {c!r} is not an integer")
        if not 1 <= c < vocab_size:
            raise ValueError(
                f"cutoffs are {found}; {c} is not in 1 … {vocab_size - 1} and would leave a band of a vocabulary of "
                f"{vocab_size} tokens empty (the vocabulary's end is no cutoff)"
            )
    for a, b in itertools.pairwise(found):
        if a >= b:
            raise ValueError(f"cutoffs are {found}; they must ascend, and {b} comes after {a}")
    return tuple(int(c) for c in found)


def band_sizes(cutoffs: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """Tokens of each band."""
    return tuple(b - a for a, b in itertools.pairwise((0, *cutoffs, vocab_size)))


def band_widths(d_model: int, div_value: float, n_bands: int) -> tuple[int, ...]:
    """d_model // div_valueⁱ for band i = 0, 1, …; ValueError where that is 0, or div_value below 1 or not finite."""
    if not 1 <= div_value < float("inf"):
        raise ValueError(f"div_value is {div_value}; it must be at least 1, and finite")
    widths = tuple(int(d_model // div_value**i) for i in range(n_bands))
    if not all(widths):
        raise ValueError(
            f"div_value is {div_value}; band {widths.index(0)} would have the width "
            f"{d_model} // {div_value}^{widths.index(0)} = 0: give a smaller div_value or fewer cutoffs"
        )
    return widths


def check_counts(token_counts: np.ndarray | None, vocab_size: int) -> np.ndarray | None:
    """The counts in float64; ValueError unless they are finite numbers ≥ 0, one a token."""
    if token_counts is None:
        return None
    counts = np.asarray(token_counts, np.float64)
    if counts.shape != (vocab_size,):
        raise ValueError(
            f"token_counts are {counts.shape}; they must be {(vocab_size,)}, one number a token"
        )
    if not (np.isfinite(counts).all() and (counts >= 0).all()):
        raise ValueError("token_counts hold a number that is negative or not finite")
    return counts


def token_order(
    cutoffs: tuple[int, ...], vocab_size: int, token_counts: np.ndarray | None
) -> np.ndarray:
    """The token at each place, int32 [V]: bands by descending count (equal ones by id), ids ascending within a band.

    Without counts, tokens are in the order of their ids.
    """
    counts = check_counts(token_counts, vocab_size)
    order = np.arange(vocab_size) if counts is None else np.argsort(-counts, kind="stable")
    edges = (0, *cutoffs, vocab_size)
    bands = [np.sort(order[a:b]) for a, b in itertools.pairwise(edges)]
    return np.concatenate(bands).astype(np.int32)


def resolve_cutoffs(
    cutoffs: Cutoffs,
    *,
    vocab_size: int,
    d_model: int,
    div_value: float,
    token_counts: np.ndarray | None,
) -> tuple[int, ...]:
    """The cutoffs as numbers: checked, or with "auto" chosen from the counts.

    Raises:
        ValueError: cutoffs that do not cut this vocabulary, "auto" without counts, or an impossible `div_value`.
    """
    band_widths(d_model, div_value, 1)
    if not isinstance(cutoffs, str):
        return check_cutoffs(cutoffs, vocab_size)
    if cutoffs != "auto":
        raise ValueError(
            f"cutoffs are {cutoffs!r}; they must be 'auto' or integers, such as (4, 8)"
        )
    counts = check_counts(token_counts, vocab_size)
    if counts is None:
        raise ValueError(
            "cutoffs are 'auto', which needs token_counts, the count of each token in the training text: give them, or "
            "cutoffs as integers, such as (2000, 10000)"
        )
    tails = 0
    while tails < _MOST_TAILS and d_model // div_value ** (tails + 1) >= 1:
        tails += 1
    return choose_cutoffs(counts, tails)


def choose_cutoffs(token_counts: np.ndarray, most_tails: int = _MOST_TAILS) -> tuple[int, ...]:
    """The cutoffs with the least cost by the model of Grave et al. 2017, section 4, from counts alone.

    k logits for each of b tokens take the time g(k, b) = max(c + k₀·b₀, c + k·b) (in logits, λ = 1). With p_i the
    share of tokens in tail i, k_i its size, and B tokens, the cost of J tails is g(c_1 + J, B) + Σ_i g(k_i, p_i·B).
    Boundaries on a grid, four to an octave, are chosen by dynamic programming, for J = 0, 1, … up to `most_tails`; the
    last J that saves 5% over the one before is taken. B = 4096, c = 2²¹, k₀·b₀ = 2¹⁷. Nothing is measured: the same
    counts give the same cutoffs on every machine. Counts of 0 in all are taken as equal ones.
    """
    counts = np.sort(np.asarray(token_counts, np.float64))[::-1]
    vocab = counts.size
    counts = counts if counts.sum() else np.ones(vocab)
    grid = _grid(vocab)
    below = np.concatenate([[0.0], np.cumsum(counts) / counts.sum()])[grid]  # share before an edge
    # spans[a, b]: the cost of a tail from edge a to edge b
    spans = _cost(grid[None, :] - grid[:, None], (below[None, :] - below[:, None]) * _BATCH)
    spans[np.tril_indices(grid.size)] = np.inf
    best: tuple[int, ...] = ()
    least = _cost(vocab, _BATCH)
    rest, nexts = np.where(np.arange(grid.size) == grid.size - 1, 0.0, np.inf), []
    for tails in range(1, min(most_tails, vocab - 1) + 1):
        # rest[a]: the least cost of so many tails from edge a to the end of the vocabulary
        through = spans + rest[None, :]
        nexts.append(np.argmin(through, axis=1))
        rest = np.min(through, axis=1)
        total = _cost(grid + tails, _BATCH) + rest
        first = int(np.argmin(total))
        if not total[first] < _WORTH * least:
            break
        least, edges = total[first], [first]
        for step in reversed(nexts[1:]):
            edges.append(int(step[edges[-1]]))
        best = tuple(int(grid[e]) for e in edges)
    return best


def _cost(size, tokens):
    """g(size, tokens)."""
    return _CALL + np.maximum(_LEAST, size * tokens)


def _grid(vocab: int) -> np.ndarray:
    """1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, … below `vocab`, and `vocab`."""
    small = {m << shift for shift in range(vocab.bit_length()) for m in (4, 5, 6, 7)}
    return np.array([*sorted(edge for edge in {1, 2, 3, *small} if edge < vocab), vocab])
