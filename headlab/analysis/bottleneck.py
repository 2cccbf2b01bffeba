"""The softmax bottleneck in nats: how far the best distributions of a rank, or of a head, are from given ones.

Row-centred log P has rank ≤ d exactly if a linear head of width d fits the distributions P exactly (Yang et al. 2018).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.flatten_util import ravel_pytree
from jaxtyping import Float
from scipy.optimize import minimize
from scipy.special import logsumexp

from headlab import heads
from headlab.analysis.ranks import rank
from headlab.analysis.spectra import spectrum
from headlab.errors import HeadlabError, UsageError
from headlab.heads.float64 import log_prob_function

_SPREADS = (1.0, 0.3)
_NORMALISED = 1e-6  # nats that a row's logsumexp may be off 0


@dataclasses.dataclass(frozen=True)
class Fit:
    """How well a head with free contexts fits given distributions.

    Attributes:
      excess: the least mean KL(p ‖ q) of all restarts, in nats a context: attained, so an upper bound on the best.
      restarts: that of each restart, in order.
      converged: whether each restart ended by its own rule, and not by the number of iterations.
    """

    excess: float
    restarts: tuple[float, ...]
    converged: tuple[bool, ...]

    @property
    def agreement(self) -> float:
        """How far the second best restart is behind, nats; inf where there is one restart alone."""
        ordered = sorted(self.restarts)
        return ordered[1] - ordered[0] if len(ordered) > 1 else math.inf


@dataclasses.dataclass(frozen=True)
class BottleneckGap:
    """Distributions P beside linear heads of one width, all in nats a context.

    Attributes:
      fit: the best linear head that was found. Its `excess` is attained: the true least excess is at most that.
      spectral_fit: the excess of softmax(best rank-d approximation of row-centred log P), attained as well.
      lower_bound: no linear head of this width is better, by the theorem in `bottleneck_gap`; far from sharp.
      estimate: ½·mean Var_p of what that approximation leaves, to second order; neither an upper nor a lower bound.
      difference: fit.excess − lower_bound: what is not known of the least excess.
      centred_rank: the numerical rank of row-centred log P; at this width or above a linear head fits exactly.
    """

    width: int
    fit: Fit
    spectral_fit: float
    lower_bound: float
    estimate: float
    difference: float
    centred_rank: int


def bottleneck_gap(
    log_p: Any, width: int, *, restarts: int = 3, iterations: int = 2000, seed: int = 0
) -> BottleneckGap:
    """How far linear heads of `width` (no bias, free contexts) are from the distributions of `log_p`.

    The lower bound: with δ = log q − log p, row-centred, Σ‖δ_n‖² ≥ R = Σ_{i > width} σ_i² of row-centred log P (Eckart
    & Young), for row-centred log Q has rank ≤ width. KL(p ‖ q) is convex along δ with curvature Var_q ≥ ‖·‖²·min q, and
    min q ≥ min p·exp(−√2·‖δ‖): so KL ≥ g(‖δ‖²) with g(x) = ½·min p·x·exp(−√(2x)) up to x = ½, and in proportion to √x
    from there. g is concave, so its sum is least with all of R in one row: mean KL ≥ g(R)/contexts.

    Args:
      log_p: `[contexts, V]`, nats, finite, each row's logsumexp 0.
      width: 1 … V.
      restarts, iterations, seed: see `fit_head`; one more restart begins at `spectral_fit`.

    Raises:
      UsageError: a number is out of its range, or rows are not finite and normalised.
    """
    log_p = _checked(log_p)
    contexts, vocab = log_p.shape
    if not 1 <= width <= vocab:
        raise UsageError(f"width is {width}; it must be in 1 … {vocab}, the vocabulary's size")
    centred = log_p - log_p.mean(axis=1, keepdims=True)
    left, values, right = np.linalg.svd(centred, full_matrices=False)
    root = np.sqrt(values[:width])
    states, rows = left[:, :width] * root, right[:width].T * root
    approximation = states @ rows.T
    missed = values[width:]
    leftover = centred - approximation
    p = np.exp(log_p)
    mean = np.sum(p * leftover, axis=1, keepdims=True)

    def build(seed: int) -> tuple[Any, Any]:
        return linear_head(vocab, width, seed), None

    fit = fit_head(log_p, build, restarts=restarts, iterations=iterations, seed=seed)
    started = _started(log_p, linear_head(vocab, width, 0), states, rows, iterations)
    fit = Fit(
        min(fit.excess, started[0]), (*fit.restarts, started[0]), (*fit.converged, started[1])
    )
    bound = _bound(float(np.sum(missed**2)), float(p.min())) / contexts
    return BottleneckGap(
        width=width,
        fit=fit,
        spectral_fit=_excess(log_p, approximation),
        lower_bound=bound,
        estimate=float(np.mean(np.sum(p * (leftover - mean) ** 2, axis=1)) / 2),
        difference=fit.excess - bound,
        centred_rank=rank(spectrum(centred)).rank,
    )


def linear_head(vocab_size: int, width: int, seed: int) -> heads.Head:
    """A linear head whose logits start with a spread of about 1 nat against standard normal contexts."""
    return heads.build(
        "untied", vocab_size=vocab_size, d_model=width, rngs=nnx.Rngs(seed), init_scale=1.0
    )


def fit_head(
    log_p: Any,
    build: Callable[[int], tuple[Any, Any]],
    *,
    restarts: int = 3,
    iterations: int = 2000,
    seed: int = 0,
) -> Fit:
    """The least mean KL(p ‖ q) over a head's parameters and one free context a row, by L-BFGS in float64.

    Args:
      log_p: `[contexts, V]`, nats, finite, each row's logsumexp 0.
      build: a seed to (head, embedding or None), with the parameters to start from.
      restarts: from seeds seed, seed + 1, …; contexts start normal with standard deviation 1 and 0.3 by turns: heads
        that bend their contexts fit some distributions from one and some from the other.
      iterations: of each restart, at most.

    Raises:
      UsageError: restarts or iterations is below 1, the head is of another vocabulary, or rows are not normalised.
      HeadlabError: no restart ended at a finite value.
    """
    log_p = _checked(log_p)
    for name, value in (("restarts", restarts), ("iterations", iterations)):
        if value < 1:
            raise UsageError(f"{name} is {value}; it must be at least 1")
    found = []
    compiled = None
    for number in range(seed, seed + restarts):
        head, embedding = build(number)
        if head.vocab_size != log_p.shape[1]:
            raise UsageError(
                f"the head is of {head.vocab_size} tokens, and the distributions of {log_p.shape[1]}"
            )
        h = np.random.default_rng(number).standard_normal((len(log_p), head.d_model))
        h *= _SPREADS[(number - seed) % len(_SPREADS)]
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            compiled, start = _objective(log_p, head, embedding, h, compiled)
            found.append(_minimised(compiled, start, iterations))
    values = tuple(value for value, _ in found)
    if not any(map(math.isfinite, values)):
        raise HeadlabError(
            f"none of {restarts} restarts ended at a finite excess: {values}. Give the head smaller "
            "initial parameters."
        )
    best = min(filter(math.isfinite, values))
    return Fit(best, values, tuple(ended for _, ended in found))


def _started(log_p, head, states, rows, iterations: int) -> tuple[float, bool]:
    """(excess, converged) of a linear head that starts at these states and rows."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        head.weight = nnx.Param(jnp.asarray(rows))
        objective, start = _objective(log_p, head, None, states, None)
        return _minimised(objective, start, iterations)


def _objective(log_p, head, embedding, h, compiled):
    """(vector → (excess, gradient), where to start); `compiled` of another restart serves again."""
    function, states = log_prob_function(head, embedding)
    start, unravel = ravel_pytree((states, jnp.asarray(h)))
    if compiled is None:
        p, entropy = np.exp(log_p), float(np.sum(np.exp(log_p) * log_p))

        def excess(vector):
            states, h = unravel(vector)
            return (entropy - jnp.sum(p * function(states, h))) / len(log_p)

        compiled = jax.jit(jax.value_and_grad(excess))
    return compiled, np.asarray(start)


def _minimised(objective, start: np.ndarray, iterations: int) -> tuple[float, bool]:
    def both(vector):
        value, gradient = objective(vector)
        return float(value), np.asarray(gradient)

    solved = minimize(
        both,
        start,
        jac=True,
        method="L-BFGS-B",
        options=dict(maxiter=iterations, maxfun=2 * iterations, maxcor=30, ftol=1e-13, gtol=1e-9),
    )
    return float(solved.fun), bool(solved.success)


def _bound(missed: float, least: float) -> float:
    """g(R) of `bottleneck_gap`."""
    if missed <= 0.5:
        return 0.5 * least * missed * math.exp(-math.sqrt(2 * missed))
    return 0.5 * least * math.sqrt(missed / 2) * math.exp(-1)


def _excess(log_p: np.ndarray, logits: np.ndarray) -> float:
    log_q = logits - logsumexp(logits, axis=1, keepdims=True)
    return float(np.mean(np.sum(np.exp(log_p) * (log_p - log_q), axis=1)))


def _checked(log_p: Any) -> Float[np.ndarray, "contexts V"]:
    array = np.asarray(log_p).astype(np.float64)
    if array.ndim != 2 or not array.size:
        raise UsageError(f"log_p is {list(array.shape)}; it must be [contexts, V], neither empty")
    if not np.isfinite(array).all():
        row, column = np.argwhere(~np.isfinite(array))[0]
        raise UsageError(
            f"log_p of row {row}, token {column} is {array[row, column]}; all probabilities must be positive, for the "
            "rank of log P needs finite numbers"
        )
    off = np.abs(logsumexp(array, axis=1))
    if off.max() > _NORMALISED:
        row = int(np.argmax(off))
        raise UsageError(
            f"row {row} of log_p has a logsumexp of {logsumexp(array[row]):.3g} in place of 0: these are no "
            "log-probabilities; take log_softmax of logits first"
        )
    return array
