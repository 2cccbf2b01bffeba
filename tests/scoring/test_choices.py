"""Choosing among candidates follows lm-evaluation-harness's rules, token by token."""

import jax
import numpy as np
import pytest

from headlab.data import Tokenizer
from headlab.errors import UsageError
from headlab.scoring import choose, choose_text

PROMPT = [6, 1, 2]
CANDIDATES = [[3], [4, 5, 6], [0, 0]]


def distributions(model, ids):
    """[len, V] log-probabilities of the token after each position, in float64."""
    padded = np.zeros((1, model.max_length), np.int32)
    padded[0, : len(ids)] = ids
    h = jax.jit(lambda model, ids: model(ids))(model, padded)
    return model.head.log_probs(h, embedding=model.embedding, dtype=np.float64)[0][: len(ids)]


def sums(model, prompt, candidate):
    """(Σ log p, whether greedy) by the whole distributions."""
    rows = distributions(model, [*prompt, *candidate])[len(prompt) - 1 : -1]
    picked = rows[np.arange(len(candidate)), candidate]
    return picked.sum(), bool((rows.argmax(axis=1) == candidate).all())


@pytest.mark.parametrize("head", ["tied", "adaptive", "mixture_of_softmaxes"])
def test_candidates_are_summed_after_the_prompt(head, make_model):
    _, model = make_model(head)
    best = list(PROMPT)
    for _ in range(3):
        best.append(int(distributions(model, best)[-1].argmax()))
    candidates = [*CANDIDATES, best[3:]]
    found = choose(model, PROMPT, candidates, byte_counts=[1, 3, 2, 7])
    for candidate, one, size in zip(candidates, found, (1, 3, 2, 7), strict=True):
        total, greedy = sums(model, PROMPT, candidate)
        assert one.log_prob == pytest.approx(total, abs=1e-4)
        assert one.log_prob_per_byte == pytest.approx(total / size, abs=1e-4)
        assert one.is_greedy == greedy
        assert one.n_tokens == len(candidate)
    assert found[-1].is_greedy
    assert choose(model, PROMPT, CANDIDATES)[0].log_prob_per_byte is None


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level, with merges that join a space and the letter after it, and `b` with a following `c`."""
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers

    pieces = ["a", "b", "c", "Ġ", "Ã", "©", "Ġa", "bc", "Ċ", "<|endoftext|>"]
    model = Model(models.BPE({p: i for i, p in enumerate(pieces)}, [("Ġ", "a"), ("b", "c")]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["<|endoftext|>"])
    return Tokenizer(model.to_str())


@pytest.mark.parametrize(
    ("prompt", "candidate", "prompt_ids", "candidate_ids"),
    [
        ("b", " a", [1], [6]),
        ("b ", "a", [1], [6]),  # the space moves to the candidate, where the token is
        ("b \n", "a", [1], [3, 8, 0]),
        ("", "ab", [9], [0, 1]),  # the separator stands in for an empty prompt
        (" ", "a", [9], [6]),
        (
            "ab",
            "cé",
            [0, 1],
            [4, 5],
        ),  # "bc" crosses the border: the prompt's two tokens are cut off, as there
        ("b", "aé", [1], [0, 4, 5]),
    ],
)
def test_a_candidates_tokens_are_those_after_the_prompts(
    prompt, candidate, prompt_ids, candidate_ids, make_model, tokenizer
):
    _, model = make_model()
    [found] = choose_text(model, tokenizer, prompt, [candidate])
    [wanted] = choose(model, prompt_ids, [candidate_ids], byte_counts=[len(candidate.encode())])
    assert found == wanted


def test_the_separator_is_put_before_a_prompt_where_asked(make_model, tokenizer):
    _, model = make_model()
    found = choose_text(model, tokenizer, "b", [" a", "a"], add_separator=True)
    assert found == choose(model, [9, 1], [[6], [0]], byte_counts=[2, 1])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"candidates": []}, "there are no candidates"),
        ({"candidates": [[1], []]}, "candidate 1 has no tokens"),
        ({"prompt_ids": []}, "the prompt is empty"),
        ({"prompt_ids": [11]}, "the prompt has the id 11"),
        ({"candidates": [[11]]}, "candidate 0 has the id 11"),
        (
            {"prompt_ids": [1] * 12, "candidates": [[1], [1, 2]]},
            "12 tokens and candidate 1 has 2.*read 13.*of 12",
        ),
        ({"byte_counts": [1]}, r"byte_counts are \[1\]; they must be 3 numbers"),
        ({"byte_counts": [1, 0, 1]}, "byte_counts are"),
    ],
)
def test_what_cannot_be_chosen_from_is_refused(changed, said, make_model):
    asked = {"prompt_ids": PROMPT, "candidates": CANDIDATES} | changed
    with pytest.raises(UsageError, match=said):
        choose(make_model()[1], **asked)


def test_an_empty_candidate_text_is_refused(make_model, tokenizer):
    with pytest.raises(UsageError, match="candidate 1 is empty"):
        choose_text(make_model()[1], tokenizer, "a", ["b", ""])
    with pytest.raises(UsageError, match="candidate 0 has no tokens"):
        choose_text(make_model()[1], tokenizer, "ab", ["c"])
