"""Which tokens can ever be the top prediction of a linear softmax: token i is unargmaxable where its row lies in the
convex hull of the others' (Demeter et al. 2020; Grivas, Bogoychev & Lopez 2022).

Quick certificates come first: directions that are likely to put a token on top. Exact linear programs settle the rest.
"""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from headlab.analysis.hull_programs import Certificate, Rows, settle
from headlab.data.progress import track
from headlab.errors import UsageError

_REFINEMENTS = 40
_AT_ONCE = 1024  # trial directions


@dataclasses.dataclass(frozen=True)
class Argmaxable:
    """Each token is reachable (with a witness), unreachable (with a certificate), or neither: undecided.

    Attributes:
      reachable, unreachable: by token.
      witnesses: a state h that puts the token strictly on top, by more than the rounding of a float64 product; NaN for
        tokens without one.
      certificates: for each unreachable token a convex combination of other rows that equals its own.
      programs: how many tokens needed linear programs.
    """

    reachable: Bool[np.ndarray, "V"]
    unreachable: Bool[np.ndarray, "V"]
    witnesses: Float[np.ndarray, "V width"]
    certificates: dict[int, Certificate]
    programs: int

    @property
    def undecided(self) -> Bool[np.ndarray, "V"]:
        """Tokens on the boundary to within rounding: neither certificate is sound in float64."""
        return ~(self.reachable | self.unreachable)


def argmaxable(weight: Any, bias: Any = None, *, progress: bool = False) -> Argmaxable:
    """Which tokens i have a state h ∈ R^width with h·w_i + b_i > h·w_j + b_j for every other j.

    States are unbounded: a body that ends in a norm reaches fewer of them. A token that only ties with another is
    unreachable. By Farkas' lemma i is unreachable exactly if some λ ≥ 0 with Σλ = 1 has Σ_j λ_j·w_j = w_i and
    Σ_j λ_j·b_j ≥ b_i; a bias is one more coordinate of a row, in which the state is fixed at 1.

    Tried first, for each token: its centred row, that row whitened by the covariance of all rows, and perceptron steps
    from there, away from whatever is on top. What is left is settled token by token: the largest margin t with
    h·(w_i − w_j) ≥ t in a box, by HiGHS, starting from few rivals j and adding those that the solution puts on top.

    Args:
      weight: `[V, width]`. bias: `[V]`, or None.
      progress: shows the linear programs on standard error.

    Raises:
      UsageError: shapes do not fit, V is below 2, or a number is not finite.

    >>> corners_and_centre = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]])
    >>> argmaxable(corners_and_centre).reachable.tolist()
    [True, True, True, True, False]
    """
    rows = Rows(*_checked(weight, bias))
    if not rows.whitened.shape[1]:
        return _all_tie(rows)
    found = np.full(rows.whitened.shape, np.nan)  # a direction that puts each token on top
    for directions in (_normalised(rows.centred_directions()), _normalised(rows.whitened)):
        _keep_winners(rows, rows.admissible(directions), found)
    _refine(rows, found)
    witnesses, reachable = rows.witnesses(found)
    # directions whose margin is lost in rounding are no witnesses: these tokens are settled, too
    left = np.flatnonzero(~reachable)
    certificates = {}
    for token in track(left, "argmaxable: linear programs", total=len(left), enabled=progress):
        settled = settle(rows, int(token))
        if isinstance(settled, Certificate):
            certificates[int(token)] = settled
        elif settled is not None:
            witnesses[token], reachable[token] = settled, True
    unreachable = np.zeros(len(reachable), bool)
    unreachable[list(certificates)] = True
    return Argmaxable(reachable, unreachable, witnesses, certificates, len(left))


def _all_tie(rows: Rows) -> Argmaxable:
    """Where all rows, and biases, are equal: each token's row is that of any other."""
    vocab = len(rows.weight)
    others = {i: Certificate(np.array([(i + 1) % vocab]), np.ones(1), 0.0) for i in range(vocab)}
    nobody = np.zeros(vocab, bool)
    return Argmaxable(nobody, ~nobody, np.full(rows.weight.shape, np.nan), others, 0)


def _checked(weight: Any, bias: Any) -> tuple[np.ndarray, np.ndarray | None]:
    weight = np.asarray(weight).astype(np.float64)
    if weight.ndim != 2 or len(weight) < 2 or not weight.shape[1]:
        raise UsageError(
            f"the weight is {list(weight.shape)}; it must be [V, width] with V at least 2"
        )
    if bias is not None:
        bias = np.asarray(bias).astype(np.float64)
        if bias.shape != weight.shape[:1]:
            raise UsageError(f"the bias is {list(bias.shape)}; it must be [{len(weight)}], a token")
    for name, array in (("weight", weight), ("bias", bias)):
        if array is not None and not np.isfinite(array).all():
            token = int(np.argwhere(~np.isfinite(array))[0][0])
            raise UsageError(f"the {name} of token {token} is not finite")
    return weight, bias


def _normalised(directions: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(directions, axis=1, keepdims=True)
    return directions / np.where(norms > 0, norms, 1)


def _keep_winners(rows: Rows, directions: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Writes each direction down for the token that it puts on top, where that has none yet; returns these tokens."""
    winners = np.empty(len(directions), np.int64)
    for first in range(0, len(directions), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        winners[part] = np.argmax(directions[part] @ rows.whitened.T, axis=1)
    tokens, places = np.unique(winners, return_index=True)
    new = np.isnan(found[tokens, 0])
    found[tokens[new]] = directions[places[new]]
    return winners


def _refine(rows: Rows, found: np.ndarray) -> None:
    """Perceptron steps for the tokens without a direction: towards the token, away from the one on top."""
    tokens = np.flatnonzero(np.isnan(found[:, 0]))
    directions = rows.admissible(_normalised(rows.whitened[tokens]))
    for step in range(_REFINEMENTS):
        if not len(tokens):
            return
        winners = _keep_winners(rows, directions, found)
        open_ = np.isnan(found[tokens, 0])
        tokens, directions, winners = tokens[open_], directions[open_], winners[open_]
        away = _normalised(rows.whitened[tokens] - rows.whitened[winners])
        moved = directions + away / (2 * np.sqrt(1 + step))
        directions = rows.admissible(_normalised(moved))
