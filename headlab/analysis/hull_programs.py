"""Whether one row lies in the convex hull of the others, by linear programs that see few of the others at a time."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.optimize import linprog, nnls

from headlab.errors import HeadlabError

_EPS = float(np.finfo(np.float64).eps)
_RESIDUAL = 1e-9  # of a certificate, relative to the largest row
_CUTS = 128  # rivals added at once


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Σ weights·rows[tokens] equals the token's row (and exceeds or equals its bias): it can't be strictly on top.

    Attributes:
      tokens, weights: the convex combination; weights are positive and sum to 1.
      residual: the largest deviation of the combination from the row, relative to the largest centred number of all.
    """

    tokens: Int[np.ndarray, "n"]
    weights: Float[np.ndarray, "n"]
    residual: float


class Rows:
    """Rows (with biases as a last coordinate), and their whitened form, in which directions are searched.

    Centring all rows changes no comparison, nor does leaving out directions in which they don't vary. `whitened`
    `[V, rank]` has covariance 1; a direction g there stands for the state `unwhitened · g`.
    """

    def __init__(self, weight: Float[np.ndarray, "V width"], bias: Float[np.ndarray, "V"] | None):
        self.weight, self.bias = weight, bias
        self._sizes = np.abs(weight)
        full = weight if bias is None else np.column_stack([weight, bias])
        self.full = full - full.mean(axis=0)
        self.largest = float(np.abs(self.full).max())
        _, values, self._basis = np.linalg.svd(self.full, full_matrices=False)
        held = values > max(full.shape) * _EPS * values[0]
        spread = values[held] / np.sqrt(len(full))
        self._basis = self._basis[held]
        self.unwhitened = (self._basis / spread[:, None]).T
        self.whitened = self.full @ self.unwhitened
        # The bias's coordinate of a state must be positive (then it scales to 1), and so must be this product with g;
        # None where it is free: without a bias, or where biases are linear in the weights.
        self.positive: np.ndarray | None = None
        self._free = np.zeros(full.shape[1])
        if bias is not None:
            unit = np.eye(full.shape[1])[-1]
            self._free = unit - self._basis.T @ (self._basis @ unit)
            if np.linalg.norm(self._free) < 1e-6:
                self.positive = self.unwhitened[-1]

    def centred_directions(self) -> Float[np.ndarray, "V rank"]:
        """The direction of each centred row itself, which as a state is that row."""
        return np.linalg.lstsq(self.unwhitened, self.full.T, rcond=None)[0].T

    def admissible(self, directions: np.ndarray) -> np.ndarray:
        """The nearest directions whose product with `positive` isn't negative."""
        if self.positive is None:
            return directions
        below = np.minimum(directions @ self.positive, 0) / (self.positive @ self.positive)
        return directions - below[:, None] * self.positive

    def witnesses(
        self, directions: Float[np.ndarray, "V rank"]
    ) -> tuple[Float[np.ndarray, "V width"], Bool[np.ndarray, "V"]]:
        """A state for each token's direction (NaN: none), and whether it puts the token strictly on top in float64."""
        states = np.full(self.weight.shape, np.nan)
        sound = np.zeros(len(states), bool)
        for token in np.flatnonzero(~np.isnan(directions[:, 0])):
            state = self.witness(int(token), directions[token])
            if state is not None:
                states[token], sound[token] = state, True
        return states, sound

    def witness(self, token: int, direction: np.ndarray) -> Float[np.ndarray, "width"] | None:
        """A state in this direction that puts the token on top by more than rounding can; None if it doesn't."""
        state = self.unwhitened @ direction
        if self.bias is None:
            return state if self._on_top(token, state) else None
        if self.positive is None:
            state = state + (1 - state[-1]) * self._free / self._free[-1]
            candidates = [state[:-1]]
        else:
            candidates = [state[:-1] / state[-1]] if state[-1] > 0 else []
            gap = self.weight @ state[:-1]
            margin = gap[token] - np.delete(gap, token).max()
            if margin > 0:  # then far out in this direction no bias matters
                candidates.append(state[:-1] * (2 * np.ptp(self.bias) / margin + 1))
        return next((h for h in candidates if self._on_top(token, h)), None)

    def _on_top(self, token: int, h: np.ndarray) -> bool:
        if not np.isfinite(h).all():
            return False
        bias = np.zeros(len(self.weight)) if self.bias is None else self.bias
        scores = self.weight @ h + bias
        sizes = self._sizes @ np.abs(h) + np.abs(bias)
        rounding = (len(h) + 1) * _EPS * float(sizes.max())
        return bool(scores[token] - np.delete(scores, token).max() > 2 * rounding)


def settle(rows: Rows, token: int) -> Float[np.ndarray, "width"] | Certificate | None:
    """A state that puts the token on top, a certificate that there is none, or None: too close to tell in float64.

    Solves max t, (z_i − z_j)·g ≥ t for the rivals j, |g|∞ ≤ 1. Where t is 0 the dual's multipliers are the convex
    combination; where the solution puts other tokens on top, these become rivals and it is solved again.
    """
    z = rows.whitened
    others = np.arange(len(z)) != token
    start = rows.admissible(z[token][None])[0]
    rivals = _best(z @ start, others, 3 * z.shape[1])
    while True:
        margin, direction, shares = _program(rows, token, rivals)
        certificate = _certificate(rows, token, rivals[shares > _EPS])
        if certificate is not None:
            return certificate
        state = rows.witness(token, direction)
        if state is not None:
            return state
        new = others.copy()
        new[rivals] = False
        scores = z @ direction
        new &= scores >= scores[token] - max(margin, 0) / 2
        if not new.any():
            return None
        rivals = np.concatenate([rivals, _best(scores, new, _CUTS)])


def _best(scores: np.ndarray, among: np.ndarray, count: int) -> np.ndarray:
    places = np.flatnonzero(among)
    if len(places) <= count:
        return places
    return places[np.argpartition(-scores[places], count)[:count]]


def _program(rows: Rows, token: int, rivals: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """(largest margin, its direction, the multipliers of the rivals)."""
    z, n = rows.whitened, rows.whitened.shape[1]
    constraints = np.column_stack([z[rivals] - z[token], np.ones(len(rivals))])
    if rows.positive is not None:
        constraints = np.vstack([constraints, np.append(-rows.positive, 0)])
    solved = linprog(
        np.append(np.zeros(n), -1),
        A_ub=constraints,
        b_ub=np.zeros(len(constraints)),
        bounds=[(-1, 1)] * n + [(None, None)],
        method="highs-ds",
    )
    if solved.x is None:
        raise HeadlabError(
            f"the linear program of token {token} wasn't solved: {solved.message}. Tokens settled before it are lost."
        )
    return float(solved.x[-1]), solved.x[:-1], -solved.ineqlin.marginals[: len(rivals)]


def _certificate(rows: Rows, token: int, support: np.ndarray) -> Certificate | None:
    """The convex combination of these rows that is the token's, if there is one to within rounding."""
    if not len(support):
        return None
    z = rows.whitened
    scale = float(np.abs(z).max())
    system = np.vstack([z[support].T, np.full(len(support), scale)])
    if rows.positive is not None:  # Σλ·b may exceed the token's bias: z_i + μ·positive, μ ≥ 0
        system = np.column_stack([system, np.append(-rows.positive, 0)])
    weights = nnls(system, np.append(z[token], scale))[0][: len(support)]
    if not weights.sum() > 0:
        return None
    weights = weights / weights.sum()
    deviation = rows.full[support].T @ weights - rows.full[token]
    if rows.positive is not None:
        deviation[-1] = min(deviation[-1], 0)
    residual = float(np.abs(deviation).max()) / rows.largest
    if residual > _RESIDUAL:
        return None
    held = weights > 0
    return Certificate(support[held], weights[held], residual)
