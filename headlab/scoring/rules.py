"""Decoding rules: which token comes next, given a distribution over all of them.

All are pure functions of log-probabilities `[..., V]` of the real tokens, in nats, whatever head they came from. Those
named `with_…` give log-probabilities again, Σ p = 1, and so can follow one another: what one makes impossible (−inf)
stays impossible. `Rules` is the usual order of them.
"""

import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from headlab.errors import UsageError


class Rules(NamedTuple):
    """Rules in the order in which they are applied; None: not applied.

    The repetition penalty, the temperature (0 is greedy), then top_k, top_p and min_p, each on what the rules before it
    left.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def greedy(log_probs: Float[Array, "*batch V"]) -> Int[Array, "*batch"]:
    """The most probable token, int32; of equal ones the lowest id.

    >>> greedy(jnp.log(jnp.array([0.2, 0.4, 0.4]))).item()
    1
    """
    return jnp.argmax(log_probs, axis=-1).astype(jnp.int32)


def with_temperature(
    log_probs: Float[Array, "*batch V"], temperature: float
) -> Float[Array, "*batch V"]:
    """log p_T(v) = log p(v)/T − log Σ_u exp(log p(u)/T), in nats: Σ p_T = 1 at every temperature.

    T = 1 leaves the distribution as it is, T above 1 flattens it, and T = 0 is its limit: all mass on the most probable
    token (of equal ones the lowest id). A token of probability 0 keeps it at every temperature.

    >>> cooled = with_temperature(jnp.log(jnp.array([0.5, 0.25, 0.25])), 0.5)
    >>> [f"{p:.3f}" for p in jnp.exp(cooled)]
    ['0.667', '0.167', '0.167']

    Raises:
      UsageError: the temperature is negative or not a finite float32.
    """
    temperature = checked_temperature(temperature)
    if temperature == 0:
        ids = jnp.arange(log_probs.shape[-1])
        return jnp.where(ids == greedy(log_probs)[..., None], 0.0, -jnp.inf).astype(log_probs.dtype)
    return jax.nn.log_softmax(_scaled(log_probs, temperature), axis=-1)


def with_top_k(log_probs: Float[Array, "*batch V"], k: int) -> Float[Array, "*batch V"]:
    """The k most probable tokens alone, renormalised (Fan et al. 2018); of equal ones the lowest ids are kept.

    >>> [f"{p:.2f}" for p in jnp.exp(with_top_k(jnp.log(jnp.array([0.2, 0.5, 0.3])), 2))]
    ['0.00', '0.62', '0.38']

    Raises:
      UsageError: k is not in 1 … V.
    """
    _check_top_k(k, log_probs.shape[-1])
    return _only(_rank(log_probs) < k, log_probs)


def with_top_p(log_probs: Float[Array, "*batch V"], p: float) -> Float[Array, "*batch V"]:
    """The nucleus, renormalised: the fewest most probable tokens with Σ p(v) ≥ p (Holtzman et al. 2020).

    A token is kept if those before it, by descending probability, then ascending id, sum to less than p: the first one
    always is, and p = 1 keeps all.

    >>> [f"{p:.2f}" for p in jnp.exp(with_top_p(jnp.log(jnp.array([0.2, 0.5, 0.3])), 0.6))]
    ['0.00', '0.62', '0.38']

    Raises:
      UsageError: p is not in (0, 1].
    """
    _check_top_p(p)
    return _nucleus(log_probs, p)


def with_min_p(log_probs: Float[Array, "*batch V"], p: float) -> Float[Array, "*batch V"]:
    """The tokens with p(v) ≥ p · max_u p(u), renormalised (Nguyen et al. 2024); p = 0 keeps all, p = 1 the best.

    >>> [f"{p:.2f}" for p in jnp.exp(with_min_p(jnp.log(jnp.array([0.1, 0.5, 0.4])), 0.3))]
    ['0.00', '0.56', '0.44']

    Raises:
      UsageError: p is not in [0, 1].
    """
    _check_min_p(p)
    return _above(log_probs, p)


def with_repetition_penalty(
    log_probs: Float[Array, "*batch V"], seen: Bool[Array, "*batch V"], penalty: float
) -> Float[Array, "*batch V"]:
    """θ·log p(v) for the tokens that were seen, log p(v) for others, renormalised; θ = 1 changes nothing.

    Keskar et al. 2019 divide the scores of tokens in the text so far by θ, which, where a score is negative, would make
    them likelier; so such scores are multiplied, as is usual. Log-probabilities all are such, and unlike logits mean
    the same for every head: a seen token has p^θ in place of p, before renormalising.

    >>> seen = jnp.array([True, False])
    >>> [f"{p:.2f}" for p in jnp.exp(with_repetition_penalty(jnp.log(jnp.array([0.5, 0.5])), seen, 2))]
    ['0.33', '0.67']

    Raises:
      UsageError: the penalty is not a positive finite number.
    """
    _check_penalty(penalty)
    return _penalised(log_probs, seen, penalty)


def sample(
    key: Array, log_probs: Float[Array, "*batch V"], temperature: float = 1.0
) -> Int[Array, "*batch"]:
    """Draws from `with_temperature(log_probs, temperature)`, int32; T = 0 is `greedy`.

    Raises:
      UsageError: the temperature is negative or not a finite float32.
    """
    temperature = checked_temperature(temperature)
    if temperature == 0:
        return greedy(log_probs)
    return _drawn(key, log_probs, temperature)


# --- under jit, with the values of rules traced ------------------------------------------------------------------


def check_rules(rules: Rules, vocab_size: int) -> None:
    """Raises UsageError for a value out of its range, as the rules themselves do."""
    checked_temperature(rules.temperature)
    for value, check in (
        (rules.top_k, lambda k: _check_top_k(k, vocab_size)),
        (rules.top_p, _check_top_p),
        (rules.min_p, _check_min_p),
        (rules.repetition_penalty, _check_penalty),
    ):
        if value is not None:
            check(value)


def chosen(
    keys: Array,
    log_probs: Float[Array, "batch V"],
    rules: Rules,
    seen: Bool[Array, "batch V"] | None,
) -> Int[Array, "batch"]:
    """The token of each row by the rules, drawn with its own key; values of rules may be traced, checked before.

    `seen` is needed for the repetition penalty alone.
    """
    if rules.repetition_penalty is not None:
        log_probs = _penalised(log_probs, seen, rules.repetition_penalty)
    best = greedy(log_probs)
    cold = rules.temperature == 0
    # the 1 keeps 0/0 out of the branch not taken
    log_probs = _scaled(log_probs, jnp.where(cold, 1, rules.temperature))
    if any(rule is not None for rule in (rules.top_k, rules.top_p, rules.min_p)):
        log_probs = jax.nn.log_softmax(log_probs, axis=-1)
    if rules.top_k is not None:
        log_probs = _only(_rank(log_probs) < rules.top_k, log_probs)
    if rules.top_p is not None:
        log_probs = _nucleus(log_probs, rules.top_p)
    if rules.min_p is not None:
        log_probs = _above(log_probs, rules.min_p)
    drawn = jax.vmap(jax.random.categorical)(keys, log_probs).astype(jnp.int32)
    return jnp.where(cold, best, drawn)


def checked_temperature(temperature: float) -> float:
    """The temperature as a float; UsageError where it is none."""
    value = float(temperature)
    limits = np.finfo(np.float32)  # what is smaller counts as 0 on a device, and 0/0 is NaN
    if value == 0 or float(limits.tiny) <= value <= float(limits.max):
        return value
    raise UsageError(
        f"temperature is {temperature}; it must be 0 (greedy) or a positive finite float32, "
        "such as 0.8"
    )


def _check_top_k(k: int, vocab_size: int) -> None:
    if not 1 <= operator.index(k) <= vocab_size:
        raise UsageError(f"top_k is {k}; it must be in 1 … {vocab_size}, the vocabulary's size")


def _check_top_p(p: float) -> None:
    if not 0 < p <= 1:
        raise UsageError(f"top_p is {p}; it must be above 0 and at most 1, such as 0.9")


def _check_min_p(p: float) -> None:
    if not 0 <= p <= 1:
        raise UsageError(f"min_p is {p}; it must be in [0, 1], such as 0.05")


def _check_penalty(penalty: float) -> None:
    if not 0 < penalty < float("inf"):
        raise UsageError(
            f"repetition_penalty is {penalty}; it must be positive and finite, such as 1.2 (1: none)"
        )


def _drawn(key, log_probs, temperature):
    return jax.random.categorical(key, _scaled(log_probs, temperature)).astype(jnp.int32)


def _scaled(log_probs, temperature):
    # The maximum goes first: divided by a tiny temperature, even it would become −inf.
    return (log_probs - jnp.max(log_probs, axis=-1, keepdims=True)) / temperature


def _rank(log_probs):
    """The place of each token, from 0, by descending probability, then ascending id."""
    order = jnp.argsort(-log_probs, axis=-1, stable=True)
    return jnp.argsort(order, axis=-1)


def _only(kept, log_probs):
    return jax.nn.log_softmax(jnp.where(kept, log_probs, -jnp.inf), axis=-1)


def _nucleus(log_probs, p):
    order = jnp.argsort(-log_probs, axis=-1, stable=True)
    probability = jnp.exp(jnp.take_along_axis(log_probs, order, axis=-1))
    before = jnp.cumsum(probability, axis=-1) - probability
    # Sums of float32 reach 1 before the last token: p = 1 is no question of rounding.
    kept = (before < p) | (p >= 1)
    kept = jnp.take_along_axis(kept.at[..., 0].set(True), jnp.argsort(order, axis=-1), axis=-1)
    return _only(kept, log_probs)


def _above(log_probs, p):
    best = jnp.max(log_probs, axis=-1, keepdims=True)
    return _only(log_probs >= best + jnp.log(p), log_probs)


def _penalised(log_probs, seen, penalty):
    return jax.nn.log_softmax(jnp.where(seen, log_probs * penalty, log_probs), axis=-1)
