"""Claims about multiple choice: its bits on other numbers of shards, and scores beside generated text.

Questions are made of held-out text: which of four continuations is the true one? The others are continuations of
other places.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from experiments.claims.findings import (
    Finding,
    interval,
    listed,
    together,
    yes,
)
from experiments.claims.runs import SPLIT, Context
from experiments.claims.shards import LogProbs, on_shards
from headlab.errors import UsageError

QUESTIONS, OPTIONS, PROMPT, ANSWER = 200, 4, 32, 4  # the last two in tokens


class Questions(NamedTuple):
    """Multiple choice in token ids."""

    prompts: Int[np.ndarray, "questions prompt"]
    answers: Int[np.ndarray, "questions options answer"]
    truth: Int[np.ndarray, "questions"]  # the number of the true answer


class Drift(NamedTuple):
    """What one number of shards changes against one shard in the same order of sums."""

    bits: int  # how many numbers differ in any bit
    of: int
    largest: float  # nats
    flips: int  # choices that differ


def questions(
    tokens: Int[np.ndarray, "tokens"],
    number: int = QUESTIONS,
    options: int = OPTIONS,
    prompt: int = PROMPT,
    answer: int = ANSWER,
    seed: int = 0,
) -> Questions:
    """Windows of a text that don't overlap, in order; wrong answers, all different, are drawn from other windows.

    Raises UsageError for a text that is too short.
    """
    length = prompt + answer
    if len(tokens) < number * length:
        raise UsageError(
            f"the text has {len(tokens)} tokens; {number} questions of {length} tokens need {number * length}"
        )
    windows = np.asarray(tokens[: number * length], np.int32).reshape(number, length)
    true = windows[:, prompt:]
    rng = np.random.default_rng(seed)
    truth = rng.integers(options, size=number)
    answers = np.empty((number, options, answer), np.int32)
    for i in range(number):
        chosen = [true[i]]
        for other in rng.permutation(number):
            if len(chosen) < options and not any((true[other] == one).all() for one in chosen):
                chosen.append(true[other])
        if len(chosen) < options:
            raise UsageError(f"the text has fewer than {options} different answers")
        wrong = iter(chosen[1:])
        answers[i] = [true[i] if place == truth[i] else next(wrong) for place in range(options)]
    return Questions(windows[:, :prompt], answers, truth)


def shard_bits(context: Context) -> Finding:
    """Which log-probabilities of answers' tokens change a bit with the number of shards."""
    return drift_finding(_log_probs(context), "log-probabilities")


def choice_drift(context: Context) -> Finding:
    """Which summed scores change a bit, and which choices flip."""
    found = _log_probs(context)
    return drift_finding(
        {key: sums(values, OPTIONS, ANSWER) for key, values in found.items()}, "scores"
    )


def scoring_generation(context: Context) -> Finding:
    """The accuracy of scores less that of greedy text, in both readings."""
    scored, exact, lenient = {}, {}, {}
    for seed, path in context.runs["tied"].items():
        asked, h, targets = _asked(context, path)
        model = context.held_out(path).restored.model
        scores = sums(_scored(model, h, targets), OPTIONS, ANSWER)
        texts = generated(model, asked.prompts, ANSWER)
        scored[seed] = float(np.mean(scores.argmax(axis=1) == asked.truth))
        exact[seed] = float(np.mean(shared_prefix(texts, asked)[0] == ANSWER))
        lenient[seed] = float(np.mean(credit(texts, asked)))
    return accuracy_finding(scored, exact, lenient)


def sums(
    log_probs: Float[np.ndarray, "tokens"], options: int, answer: int
) -> Float[np.ndarray, "questions options"]:
    """Σ log p of each answer, added in float64, which is exact enough to keep every changed bit."""
    return log_probs.astype(np.float64).reshape(-1, options, answer).sum(axis=-1)


def drifts(found: Mapping[tuple[str, int], np.ndarray]) -> dict[tuple[str, int], Drift]:
    """Each number of shards but one beside one shard; choices are the largest of a last axis, where there are two."""
    compared = {}
    for (order, n), values in found.items():
        one = found[order, 1]
        if n > 1:
            flips = (values.argmax(axis=-1) != one.argmax(axis=-1)).sum() if values.ndim > 1 else 0
            largest = np.abs(values.astype(np.float64) - one).max()
            compared[order, n] = Drift(
                int((values != one).sum()), values.size, float(largest), int(flips)
            )
    return compared


def drift_finding(found: Mapping[tuple[str, int], np.ndarray], what: str) -> Finding:
    """The verdict on numbers by order and number of shards."""
    compared = drifts(found)
    fast, invariant = (
        {n: drift for (order, n), drift in compared.items() if order == wanted}
        for wanted in ("fast", "invariant")
    )
    verdict = yes(
        any(drift.bits for drift in fast.values())
        and not any(drift.bits for drift in invariant.values())
    )
    total = next(iter(fast.values())).of
    flips = [str(drift.flips) for drift in fast.values()]
    choices = (
        f", choices that flip {listed(flips)} of {len(next(iter(found.values())))}"
        if next(iter(found.values())).ndim > 1
        else ""
    )
    largest = max(drift.largest for drift in fast.values())
    text = (
        f"of {total:,} {what} {listed([f'{drift.bits:,}' for drift in fast.values()])} differ on "
        f"{listed([str(n) for n in fast])} shards, by {largest:.1e} nats at most{choices}; "
        f"in the invariant order {listed([str(drift.bits) for drift in invariant.values()])}"
    )
    figures = {f"{order},{n}": drift._asdict() for (order, n), drift in compared.items()}
    return Finding(figures, verdict, text)


def generated(model: Any, prompts: Int[np.ndarray, "questions prompt"], length: int) -> np.ndarray:
    """Greedy text after each prompt, `[questions, length]`."""
    from headlab.scoring import generate

    return np.array(generate(model, prompts.tolist(), max_new_tokens=length))


def shared_prefix(
    texts: Int[np.ndarray, "questions answer"], asked: Questions
) -> tuple[Int[np.ndarray, "questions"], Int[np.ndarray, "questions options"]]:
    """How many first tokens each text shares with the true answer, and with every answer."""
    same = np.cumprod(texts[:, None] == asked.answers, axis=-1).sum(axis=-1)
    return same[np.arange(len(same)), asked.truth], same


def credit(texts: Int[np.ndarray, "questions answer"], asked: Questions) -> np.ndarray:
    """What a lenient reader gives a text: 1 where the true answer shares the most with it, 1/k where k answers do."""
    true, every = shared_prefix(texts, asked)
    best = every.max(axis=1)
    return (true == best) / (every == best[:, None]).sum(axis=1)


def accuracy_finding(
    scored: Mapping[int, float], exact: Mapping[int, float], lenient: Mapping[int, float]
) -> Finding:
    """The verdict on accuracies by seed."""
    differences = [interval(scored, one) for one in (exact, lenient)]
    verdict = together(yes(one.low > 0 or one.high < 0) for one in differences)
    means = [interval(one).mean for one in (scored, exact, lenient)]
    found = (
        f"{means[0]:.1%} by scores; by text {means[1]:.1%}, a difference of {differences[0].text('+.3f')}; read "
        f"leniently {means[2]:.1%}, {differences[1].text('+.3f')}"
    )
    figures = dict(zip(("scored", "exact", "lenient"), means, strict=True))
    return Finding({**figures, "differences": differences}, verdict, found)


@functools.cache
def _log_probs(context: Context) -> LogProbs:
    """Both claims about shards read one measurement."""
    path = context.runs["tied"][0]
    _, h, targets = _asked(context, path)
    return on_shards(path, h, targets, context.workdir / "shards")


def _asked(context: Context, path: Path) -> tuple[Questions, np.ndarray, np.ndarray]:
    """(the questions, the states before each token of each answer, those tokens)."""
    from headlab.runs import RunDirectory, dataset_of

    restored = context.held_out(path).restored
    asked = questions(dataset_of(RunDirectory(path), restored).store.tokens(SPLIT))
    return asked, *answer_states(restored.model, asked)


def answer_states(model: Any, asked: Questions) -> tuple[np.ndarray, np.ndarray]:
    """(states `[questions·options·answer, d]`, the tokens after them)."""
    import jax
    from flax import nnx

    number, options, answer = asked.answers.shape
    prompt = asked.prompts.shape[1]
    prompts = np.repeat(asked.prompts, options, axis=0)
    whole = np.concatenate([prompts, asked.answers.reshape(-1, answer)], axis=1)
    graph, state = nnx.split(model)
    h = np.asarray(jax.jit(lambda state, ids: nnx.merge(graph, state)(ids))(state, whole[:, :-1]))
    return h[:, prompt - 1 :].reshape(number * options * answer, -1), asked.answers.reshape(-1)


def _scored(model: Any, h: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """log p(target) in nats on one device."""
    import jax
    import jax.numpy as jnp

    nll = jax.jit(lambda h, ids: model.head.nll(h, ids, embedding=model.embedding))
    return -np.asarray(nll(jnp.asarray(h), jnp.asarray(targets)))
