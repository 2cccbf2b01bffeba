"""Multiple choice, by the rule of the evaluation harnesses: which candidate the model finds most probable.

The figures are those of EleutherAI's lm-evaluation-harness (Gao et al. 2021): the summed log-probability of each
candidate after the prompt ("acc" takes the largest), the same by byte ("acc_bytes"), and whether greedy decoding would
give the candidate.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from headlab.data import Tokenizer
from headlab.errors import UsageError
from headlab.scoring.score import checked_ids, score_sequences, total_log_prob


class Candidate(NamedTuple):
    """What the model says of one candidate."""

    log_prob: float  # Σ log p(token | prompt and the candidate's tokens before), nats
    log_prob_per_byte: (
        float | None
    )  # by UTF-8 bytes of the candidate's text; None where its text is not known
    is_greedy: bool  # every token of it is the most probable one (of equal ones the lowest id)
    n_tokens: int


def choose(
    model: Any,
    prompt_ids: Sequence[int],
    candidates: Sequence[Sequence[int]],
    *,
    byte_counts: Sequence[int] | None = None,
    batch_size: int = 8,
    mesh: Mesh | None = None,
) -> list[Candidate]:
    """Σ log p(candidate | prompt) of every candidate, in their order; the largest is the model's choice.

    Args:
      model: see `score`.
      prompt_ids: at least one, for something must predict the candidate's first token.
      candidates: the ids of each, at least one. Prompt and candidate without its last token must fit the model:
        nothing is cut off.
      byte_counts: the UTF-8 bytes of each candidate's text, at least 1, for `log_prob_per_byte`.
      batch_size, mesh: see `score`.

    Raises:
      UsageError: no candidates, an empty one or an empty prompt, an id outside the vocabulary, a candidate that does
        not fit the model, or byte counts that are not one positive number a candidate.
      HeadlabError: a log-probability is NaN.
    """
    pairs = [(prompt_ids, candidate) for candidate in candidates]
    return choose_pairs(model, pairs, byte_counts=byte_counts, batch_size=batch_size, mesh=mesh)


def choose_text(
    model: Any,
    tokenizer: Tokenizer,
    prompt: str,
    candidates: Sequence[str],
    *,
    add_separator: bool = False,
    batch_size: int = 8,
    mesh: Mesh | None = None,
) -> list[Candidate]:
    """`choose` for text, tokenized as lm-evaluation-harness does; see `pair_ids`.

    Bytes are those of the candidate as given, without white space moved to it from the prompt.

    Args:
      add_separator: put it before the prompt, as in the documents that headlab's models are trained on; by
        default, as in the harness, only an empty prompt has it.

    Raises:
      UsageError: as `choose`; also where a candidate has no token of its own, for encode(prompt + candidate) ends
        within the prompt's tokens.
    """
    for number, candidate in enumerate(candidates):
        if not candidate:
            raise UsageError(f"candidate {number} is empty; it must have at least one character")
    asked = [(prompt, candidate) for candidate in candidates]
    pairs = pair_ids(tokenizer, asked, add_start=add_separator)
    sizes = [len(candidate.encode()) for candidate in candidates]
    return choose_pairs(model, pairs, byte_counts=sizes, batch_size=batch_size, mesh=mesh)


def pair_ids(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], *, add_start: bool = False
) -> list[tuple[list[int], list[int]]]:
    """The ids of (prompt, candidate) texts, by the rule of lm-evaluation-harness.

    White space at the end of the prompt is moved to the front of the candidate, for a token often begins with its
    space. Then, with n the number of tokens of the prompt alone, the candidate's tokens are those of
    encode(prompt + candidate) from the n-th on. After an empty prompt (also one of white space alone) the tokenizer's
    `start_id` stands in its place; with `add_start`, before every prompt.
    """
    prompts = [prompt.rstrip() for prompt, _ in pairs]
    different = list(dict.fromkeys(prompts))  # the candidates of one question share theirs
    alone = dict(zip(different, tokenizer.encode_batch(different), strict=True))
    together = tokenizer.encode_batch([prompt + candidate for prompt, candidate in pairs])
    start = [tokenizer.start_id] if add_start else []
    found = []
    for prompt, ids in zip(prompts, together, strict=True):
        before = alone[prompt]
        found.append((start + before or [tokenizer.start_id], ids[len(before) :]))
    return found


def choose_pairs(
    model: Any,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    byte_counts: Sequence[int] | None = None,
    batch_size: int = 8,
    mesh: Mesh | None = None,
) -> list[Candidate]:
    """What `choose` says of the candidate of each (prompt, candidate), both ids; raises as `choose`."""
    if not pairs:
        raise UsageError("there are no candidates to choose from; give at least one")
    if byte_counts is not None and (
        len(byte_counts) != len(pairs) or min(map(operator.index, byte_counts)) < 1
    ):
        raise UsageError(
            f"byte_counts are {list(byte_counts)}; they must be {len(pairs)} numbers of at least 1, one a candidate"
        )
    size, sequences, first = model.head.vocab_size, [], []
    for number, (prompt, candidate) in enumerate(pairs):
        if not len(prompt):
            raise UsageError(
                "the prompt is empty, so that nothing predicts a candidate's first token; begin it with the "
                "tokenizer's separator"
            )
        if not len(candidate):
            raise UsageError(
                f"candidate {number} has no tokens of its own; it must have at least 1"
            )
        read = len(prompt) + len(candidate) - 1
        if read > model.max_length:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens and candidate {number} has {len(candidate)}: the model would "
                f"read {read}, more than its max_length of {model.max_length}; shorten the prompt"
            )
        ids = (
            checked_ids(prompt, "the prompt", size),
            checked_ids(candidate, f"candidate {number}", size),
        )
        sequences.append(np.concatenate(ids))
        first.append(len(prompt))
    found = []
    scored = score_sequences(model, sequences, first, batch_size=batch_size, mesh=mesh)
    for i, scores in enumerate(scored):
        total = total_log_prob(scores)
        greedy = all(token.rank == 1 for token in scores)
        by_byte = None if byte_counts is None else total / byte_counts[i]
        found.append(Candidate(total, by_byte, greedy, len(scores)))
    return found
