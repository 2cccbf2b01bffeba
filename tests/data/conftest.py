"""What the tests of data share: a cache of their own, and small corpora held in memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headlab.data.cache import content_key


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache directory of one test."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("HEADLAB_CACHE", str(directory))
    return directory


class MemoryCorpus:
    """Documents by split; it counts how often each split was read."""

    def __init__(self, **splits: list[str]):
        self.name = "memory"
        self.splits = splits
        self.fingerprint = content_key(splits)
        self.reads = dict.fromkeys(splits, 0)

    def documents(self, split: str) -> Iterator[str]:
        self.reads[split] += 1
        yield from self.splits[split]

    def size_hint(self, split: str) -> int | None:
        return len(self.splits[split])


@pytest.fixture
def memory_corpus() -> Callable[..., MemoryCorpus]:
    """Makes a corpus of the given documents by split."""
    return MemoryCorpus


_WORDS = ["the", "of", "and", "to", "in", "that", "it", "was", "for", "his", "they", "have"]


def prose(n_documents: int, seed: int, alphabet: str = "abcdefghijklmnop é日🙂\n") -> list[str]:
    """Documents of common words and of words that occur once, in several scripts."""
    rng = random.Random(seed)
    documents = []
    for _ in range(n_documents):
        words = [
            rng.choice(_WORDS) if rng.random() < 0.7 else "".join(rng.choices(alphabet, k=5))
            for _ in range(rng.randrange(1, 60))
        ]
        documents.append(" ".join(words) + ".")
    return documents


@pytest.fixture
def small_corpus() -> MemoryCorpus:
    """A corpus that supports a vocabulary of some 400 tokens."""
    return MemoryCorpus(train=prose(300, 0), validation=prose(40, 1), test=prose(30, 2))
