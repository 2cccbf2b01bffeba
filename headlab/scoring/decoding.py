"""Decoding: which token comes next, given a distribution over all of them.

The rules are pure functions of log-probabilities `[..., V]` of the real tokens, whatever head they
came from; `generate` applies them to a model, one token after the other.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from headlab.errors import HeadlabError, UsageError

_NOT_A_NUMBER = -1  # stands where a model gave no distribution


def greedy(log_probs: Float[Array, "*batch V"]) -> Int[Array, "*batch"]:
    """The most probable token, int32; of equal ones the lowest id."""
    return jnp.argmax(log_probs, axis=-1).astype(jnp.int32)


def with_temperature(
    log_probs: Float[Array, "*batch V"], temperature: float
) -> Float[Array, "*batch V"]:
    """log p_T(v) = log p(v)/T − log Σ_u exp(log p(u)/T), in nats: Σ p_T = 1 at every temperature.

    T = 1 leaves the distribution as it is, T above 1 flattens it, and T = 0 is its limit: all mass
    on the most probable token (of equal ones the lowest id). A token of probability 0 keeps it at
    every temperature.

    >>> cooled = with_temperature(jnp.log(jnp.array([0.5, 0.25, 0.25])), 0.5)
    >>> [f"{p:.3f}" for p in jnp.exp(cooled)]
    ['0.667', '0.167', '0.167']

    Raises:
      UsageError: the temperature is negative or not a finite float32.
    """
    temperature = _checked_temperature(temperature)
    if temperature == 0:
        ids = jnp.arange(log_probs.shape[-1])
        return jnp.where(ids == greedy(log_probs)[..., None], 0.0, -jnp.inf).astype(log_probs.dtype)
    return jax.nn.log_softmax(_scaled(log_probs, temperature), axis=-1)


def sample(
    key: Array, log_probs: Float[Array, "*batch V"], temperature: float = 1.0
) -> Int[Array, "*batch"]:
    """Draws from `with_temperature(log_probs, temperature)`, int32; T = 0 is `greedy`.

    Raises:
      UsageError: the temperature is negative or not a finite float32.
    """
    temperature = _checked_temperature(temperature)
    if temperature == 0:
        return greedy(log_probs)
    return _drawn(key, log_probs, temperature)


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    max_length: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """The `max_new_tokens` tokens that the model puts after each prompt (without the prompt).

    A token depends on the seed, its row, its position and what stands before it in its row, not on
    the other prompts. One program is compiled for a number of prompts and a `max_length`, whatever
    their lengths, the temperature, the seed and the number of new tokens: the rows are held in an
    array `[prompts, max_length]`, padded on the right, which a causal model cannot see. The head
    runs on the last position of each row alone.

    Args:
      model: `model(ids)` gives hidden states; `model.head` and `model.embedding` make
        log-probabilities of them.
      prompts: token ids, at least one a prompt.
      max_new_tokens: at least 0.
      max_length: of prompt and new tokens together; at most the longest sequence of the model.
      temperature: 0 is greedy.
      seed: in [0, 2**31).

    Raises:
      UsageError: a prompt is empty, has an id outside the vocabulary, or does not fit `max_length`
        together with what is to follow; or a number is out of its range.
      HeadlabError: the model's log-probabilities are NaN.
    """
    temperature = _checked_temperature(temperature)
    rows = [np.array([operator.index(id_) for id_ in prompt], np.int64) for prompt in prompts]
    _check(rows, max_new_tokens, max_length, seed, model.head.vocab_size)
    if not rows:
        return []
    # Any real id does as padding; one outside the vocabulary would embed as NaN, and attention's
    # weight of 0 times NaN is NaN.
    buffer = np.zeros((len(rows), max_length), np.int32)
    lengths = np.array([len(row) for row in rows], np.int32)
    for line, row in zip(buffer, rows, strict=True):
        line[: len(row)] = row
    graph, state = nnx.split(model)
    filled = np.asarray(
        _generate(
            graph, state, buffer, lengths, np.int32(max_new_tokens), np.float32(temperature), seed
        )
    )
    new = [
        line[length : length + max_new_tokens].tolist()
        for line, length in zip(filled, lengths, strict=True)
    ]
    for number, tokens in enumerate(new):
        if _NOT_A_NUMBER in tokens:
            raise HeadlabError(
                f"the model's log-probabilities for prompt {number} are NaN after "
                f"{tokens.index(_NOT_A_NUMBER)} new tokens: its parameters are not finite. "
                "Decode from an earlier checkpoint."
            )
    return new


@functools.partial(jax.jit, static_argnums=0)
def _generate(graph, state, buffer, lengths, n_new, temperature, seed):
    model = nnx.merge(graph, state)
    row = jnp.arange(buffer.shape[0], dtype=jnp.int32)
    row_keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(row)

    def add_one(step, buffer):
        position = lengths + step  # of the token to come
        h = model(buffer)[row, position - 1]
        log_probs = model.head.log_probs(h, embedding=model.embedding)
        keys = jax.vmap(jax.random.fold_in)(row_keys, position)
        # traced, so that one program serves all; the 1 keeps 0/0 out of the branch not taken
        drawn = jax.vmap(_drawn, in_axes=(0, 0, None))(
            keys, log_probs, jnp.where(temperature == 0, 1, temperature)
        )
        chosen = jnp.where(temperature == 0, greedy(log_probs), drawn)
        chosen = jnp.where(jnp.isnan(log_probs).any(axis=-1), _NOT_A_NUMBER, chosen)
        return buffer.at[row, position].set(chosen)

    return jax.lax.fori_loop(0, n_new, add_one, buffer)


def _drawn(key, log_probs, temperature):
    return jax.random.categorical(key, _scaled(log_probs, temperature)).astype(jnp.int32)


def _scaled(log_probs, temperature):
    # The maximum goes first: divided by a tiny temperature, even it would become −inf.
    return (log_probs - jnp.max(log_probs, axis=-1, keepdims=True)) / temperature


def _checked_temperature(temperature: float) -> float:
    value = float(temperature)
    limits = np.finfo(np.float32)  # what is smaller counts as 0 on a device, and 0/0 is NaN
    if value == 0 or float(limits.tiny) <= value <= float(limits.max):
        return value
    raise UsageError(
        f"temperature is {temperature}; it must be 0 (greedy) or a positive finite float32, "
        "such as 0.8"
    )


def _check(
    rows: Sequence[np.ndarray], max_new_tokens: int, max_length: int, seed: int, vocab_size: int
) -> None:
    if operator.index(max_new_tokens) < 0:
        raise UsageError(f"max_new_tokens is {max_new_tokens}; it must be at least 0")
    if operator.index(max_length) < 1:
        raise UsageError(f"max_length is {max_length}; it must be at least 1")
    if not 0 <= operator.index(seed) < 2**31:
        raise UsageError(f"seed is {seed}; it must be in [0, {2**31})")
    for number, row in enumerate(rows):
        if not len(row):
            raise UsageError(
                f"prompt {number} is empty, so that nothing predicts its first token; begin it "
                "with the tokenizer's separator"
            )
        wrong = row[(row < 0) | (row >= vocab_size)]
        if len(wrong):
            raise UsageError(
                f"prompt {number} has the id {wrong[0]}; ids must be in [0, {vocab_size}), the "
                "model's vocabulary"
            )
        if len(row) + max_new_tokens > max_length:
            raise UsageError(
                f"prompt {number} has {len(row)} tokens, which with {max_new_tokens} new ones make "
                f"{len(row) + max_new_tokens}, more than the max_length of {max_length}; shorten "
                "the prompt or ask for fewer new tokens"
            )
