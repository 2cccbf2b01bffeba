"""Documents fall into splits by their text alone, and cutting a text loses nothing of it."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from headlab.data.splitting import SPLITS, pieces, split_of


def test_two_percent_of_documents_are_validation_and_two_percent_test():
    n, share = 40_000, 0.02
    counts = Counter(split_of(f"document {number}") for number in range(n))
    assert counts.keys() == set(SPLITS)
    five_sigma = 5 * math.sqrt(n * share * (1 - share))
    assert abs(counts["validation"] - n * share) < five_sigma
    assert abs(counts["test"] - n * share) < five_sigma


def test_the_split_of_a_document_never_changes():
    golden = {"": "train", "headlab": "train", "Grüße, 世界 🙂": "train", "document 35": "test"}
    golden |= {"document 59": "validation", "document 138": "validation", "document 228": "test"}
    assert {text: split_of(text) for text in golden} == golden, (
        "the split of a document has changed: every corpus, store and held-out loss changes with "
        "it. Update these values only with a decision to make all recorded results anew."
    )


def _texts() -> list[str]:
    rng = random.Random(0)
    kinds = ["word ", "End. ", "line\n", "blank\n\n", "crlf\r\n\r\n", " \t ", "é日🙂", "x" * 30]
    mixed = ["".join(rng.choices(kinds, k=rng.randrange(400))) for _ in range(60)]
    return [*mixed, "", "\n" * 500, " " * 333, "a" * 1000, "no boundary" * 100, "short"]


@pytest.mark.parametrize("size", [2, 7, 100])
def test_the_documents_of_a_text_joined_are_the_text(size: int):
    for text in _texts():
        documents = list(pieces([text], size))
        assert "".join(documents) == text
        assert all(documents)
        assert all(size // 2 <= len(document) <= size for document in documents[:-1])
        assert not documents or len(documents[-1]) <= size


def test_documents_do_not_depend_on_how_the_text_comes_in_chunks():
    rng = random.Random(1)
    for text in _texts():
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(5))
        chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert list(pieces(chunks, 50)) == list(pieces([text], 50))


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("one two. three\n\nfour\nfive. six seven", "one two. three\n\n"),
        ("one two. three\r\n \r\nfour\nfive. six seven", "one two. three\r\n \r\n"),
        ("one two. three\nfour. five six seven", "one two. three\n"),
        ('one "two three." Four five six seven', 'one "two three." '),
        ("one two three four five six seven", "one two three four "),
        ("onetwothreefourfivesixseven", "onetwothreefourfives"),
    ],
)
def test_a_cut_falls_at_the_best_boundary_in_reach(text: str, first: str):
    assert next(iter(pieces([text], 20))) == first
