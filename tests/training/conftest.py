"""A small corpus of made-up words, written once a session."""

import random

import pytest


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory):
    """The name of a `text:` corpus of 800 kB or so, with words of Zipf-like frequency."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 8))) for _ in range(500)]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    with path.open("w") as file:
        for _ in range(300):
            file.write(" ".join(rng.choices(words, weights, k=rng.randint(200, 700))) + ".\n\n")
    return f"text:{path}"
