"""Decoding with a cache of keys and values: tokens that a model puts after a prompt, one after the other.

Which token is chosen the rules say (`headlab.scoring.rules`), whatever the head.
"""

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int32

from headlab.errors import HeadlabError, UsageError
from headlab.scoring.rules import Rules, check_rules, chosen
from headlab.scoring.windows import bucket

_NOT_A_NUMBER = -1  # stands where a model gave no distribution


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    max_length: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """The `max_new_tokens` tokens that the model puts after each prompt (without the prompt).

    A token depends on the seed, its row, its position and what stands before it in its row, not on the other prompts.
    Each token costs one position of the model: keys and values of those before it are kept. The head runs on the last
    position of each row alone. Programs are compiled for a number of prompts, the next power of two of the longest
    prompt, and that of prompt and new tokens together, whatever the lengths, the seed and the values of the rules that
    are applied.

    Args:
      model: a `headlab.models.Decoder`, or what has its `cached`, `empty_cache`, `max_length`, `head` and `embedding`.
      prompts: token ids, at least one a prompt.
      max_new_tokens: at least 0.
      max_length: of prompt and new tokens together; None is the longest sequence of the model, and it is at most that.
      temperature: 0 is greedy. For it and the other rules see `headlab.scoring.rules`: applied in the order of `Rules`,
        None is not at all. The repetition penalty is for all tokens of the row so far, the prompt's too.
      seed: in [0, 2**31).

    Raises:
      UsageError: a prompt is empty, has an id outside the vocabulary, or does not fit `max_length` together with what
        is to follow; or a number is out of its range.
      HeadlabError: the model's log-probabilities are NaN.
    """
    rules = Rules(temperature, top_k, top_p, min_p, repetition_penalty)
    steps = tokens_after(
        model, prompts, rules, max_new_tokens=max_new_tokens, max_length=max_length, seed=seed
    )
    columns = list(steps)
    return [[int(column[row]) for column in columns] for row in range(len(prompts))]


def tokens_after(
    model: Any,
    prompts: Sequence[Sequence[int]],
    rules: Rules,
    *,
    max_new_tokens: int,
    max_length: int | None = None,
    seed: int = 0,
) -> Iterator[Int32[np.ndarray, "prompts"]]:
    """`generate` step by step: the next token of each prompt as soon as it is there; checks before the first step."""
    longest = model.max_length if max_length is None else operator.index(max_length)
    rows = [np.array([operator.index(id_) for id_ in prompt], np.int64) for prompt in prompts]
    check_rules(rules, model.head.vocab_size)
    _check(rows, max_new_tokens, longest, model.max_length, seed, model.head.vocab_size)
    if not rows or not max_new_tokens:
        return iter(())
    return _steps(model, rows, rules, max_new_tokens, model.max_length, seed)


def _steps(model, rows, rules, max_new_tokens, longest, seed) -> Iterator[np.ndarray]:
    lengths = np.array([len(row) for row in rows], np.int32)
    size = int(lengths.max())
    # Any real id does as padding; one outside the vocabulary would embed as NaN, and attention's weight of 0 times NaN
    # is NaN.
    tokens = np.zeros((len(rows), bucket(size, longest)), np.int32)
    for line, row in zip(tokens, rows, strict=True):
        line[: len(row)] = row
    slots = bucket(size + max_new_tokens, longest)
    traced = jax.tree.map(np.float32, rules)
    graph, state = nnx.split(model)
    seed = np.uint32(seed)
    token, cache, seen = _begin(graph, state, tokens, lengths, traced, seed, slots)
    for step in range(max_new_tokens):
        if step:
            place = lengths + np.int32(step - 1)
            token, cache, seen = _advance(graph, state, token, place, cache, seen, traced, seed)
        column = np.asarray(token)
        if (column == _NOT_A_NUMBER).any():
            row = int(np.argmax(column == _NOT_A_NUMBER))
            raise HeadlabError(
                f"the model's log-probabilities for prompt {row} are NaN after {step} new tokens: "
                "its parameters are not finite. Decode from an earlier checkpoint."
            )
        yield column


@functools.partial(jax.jit, static_argnums=(0, 6))
def _begin(graph, state, tokens, lengths, rules, seed, slots: int):
    """(the first token of each row, the filled cache, the tokens seen)."""
    model = nnx.merge(graph, state)
    row, place = jnp.arange(tokens.shape[0])[:, None], jnp.arange(tokens.shape[1])
    cache = model.empty_cache(tokens.shape[0], slots)
    # Padding fills slots after the prompt's, which are written again before they are seen.
    h, cache = model.cached(tokens, cache, jnp.broadcast_to(place, tokens.shape))
    seen = None
    if rules.repetition_penalty is not None:
        ids = jnp.where(place < lengths[:, None], tokens, model.head.vocab_size)
        seen = jnp.zeros((tokens.shape[0], model.head.vocab_size), bool)
        seen = seen.at[row, ids].set(True, mode="drop")
    last = h[row[:, 0], lengths - 1]
    return _next(model, last, lengths, cache, seen, rules, seed)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(4, 5))
def _advance(graph, state, token, position, cache, seen, rules, seed):
    """(the next token of each row, the cache, the tokens seen), given the token at `position`."""
    model = nnx.merge(graph, state)
    h, cache = model.cached(token[:, None], cache, position[:, None])
    return _next(model, h[:, 0], position + 1, cache, seen, rules, seed)


def _next(model, h, position, cache, seen, rules, seed):
    """The token at `position` of each row from the states [rows, d_model] before it."""
    row = jnp.arange(h.shape[0], dtype=jnp.int32)
    row_keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(row)
    log_probs = model.head.log_probs(h, embedding=model.embedding)
    keys = jax.vmap(jax.random.fold_in)(row_keys, position)
    token = chosen(keys, log_probs, rules, seen)
    if seen is not None:
        seen = seen.at[row, token].set(True)
    token = jnp.where(jnp.isnan(log_probs).any(axis=-1), _NOT_A_NUMBER, token)
    return token, cache, seen


def _check(
    rows: Sequence[np.ndarray],
    max_new_tokens: int,
    max_length: int,
    longest: int,
    seed: int,
    vocab_size: int,
) -> None:
    if operator.index(max_new_tokens) < 0:
        raise UsageError(f"max_new_tokens is {max_new_tokens}; it must be at least 0")
    if not 1 <= max_length <= longest:
        raise UsageError(
            f"max_length is {max_length}; it must be in 1 … {longest}, the longest sequence of the model"
        )
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
