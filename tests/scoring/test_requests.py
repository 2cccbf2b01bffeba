"""What an evaluation harness asks for is read by its rules: what fits, windows, arguments of generation."""

import pytest

from headlab.errors import UsageError
from headlab.scoring import Rules
from headlab.scoring.requests import fitted, generation, rolling


def test_the_windows_are_those_of_the_harness():
    """The example in the documentation of its `loglikelihood_rolling`: ten tokens, four at once."""
    windows = list(rolling(range(10), -1, 4))
    read = [[*context, *continuation][:-1] for context, continuation in windows]
    assert read == [[-1, 0, 1, 2], [3, 4, 5, 6], [5, 6, 7, 8]]
    assert [list(continuation) for _, continuation in windows] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_windows_score_each_token_once_and_read_all_that_fits(length):
    ids = list(range(100, 100 + length))
    windows = list(rolling(ids, 7, 4))
    assert [i for _, continuation in windows for i in continuation] == ids
    for number, (context, continuation) in enumerate(windows):
        assert context and len(context) + len(continuation) - 1 == (4 if number else min(length, 4))
    assert list(rolling([], 7, 4)) == []


@pytest.mark.parametrize(
    ("context", "continuation", "kept"),
    [([1, 2, 3], [4], [1, 2, 3]), ([1, 2, 3, 4], [5, 6], [2, 3, 4]), ([1, 2], [3, 4, 5, 6], [2])],
)
def test_a_context_is_cut_on_its_left(context, continuation, kept):
    assert fitted(context, continuation, 4) == (kept, continuation)


def test_a_continuation_longer_than_the_model_is_refused():
    with pytest.raises(UsageError, match="a continuation has 5 tokens; the model reads 4"):
        fitted([1], [2, 3, 4, 5, 6], 4)


@pytest.mark.parametrize(
    ("arguments", "rules", "stop", "length"),
    [
        ({}, Rules(0.0), (), 9),
        ({"until": "a", "max_gen_toks": 3}, Rules(0.0), ("a",), 3),
        ({"until": ["a", "b"], "max_new_tokens": 3, "until_": None}, None, None, None),
        ({"until": None, "max_tokens": 3, "max_gen_toks": 3}, Rules(0.0), (), 3),
        ({"temperature": 0.5, "top_k": 2}, Rules(0.5, top_k=2), (), 9),
        ({"do_sample": True, "temperature": 1, "top_p": 0.9}, Rules(1, top_p=0.9), (), 9),
        ({"do_sample": False, "temperature": 1.0}, Rules(0.0), (), 9),
    ],
)
def test_arguments_of_generation(arguments, rules, stop, length):
    if rules is None:
        with pytest.raises(
            UsageError, match="until_=None is unknown to headlab; did you mean until"
        ):
            generation(arguments, 9)
        return
    assert generation(arguments, 9) == (rules, stop, length)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_beams": 4}, "num_beams=4 is unknown to headlab"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1 is unknown"),
        ({"max_gen_toks": 0}, "max_gen_toks is 0; it must be an integer of at least 1"),
        ({"max_gen_toks": 4, "max_tokens": 5}, "max_gen_toks=4 and max_tokens=5 contradict"),
        ({"do_sample": True}, "do_sample is true without a temperature above 0"),
        ({"do_sample": "yes"}, "do_sample is 'yes'; it must be true or false"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"until": ["a", ""]}, "until has ''; it must be a text of at least one character"),
        ({"until": [3]}, "until has 3; it must be a text"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, said):
    with pytest.raises(UsageError, match=said):
        generation(arguments, 9)
