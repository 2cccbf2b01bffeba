"""Corpora, tokenizers, token stores and the order of batches, in NumPy alone (quick to import)."""

from __future__ import annotations

from typing import Any, NamedTuple

from headlab.data.batches import Batch, EvalBatches, TrainBatches
from headlab.data.cache import cache_dir
from headlab.data.corpora import Corpus, open_corpus
from headlab.data.splitting import SPLITS
from headlab.data.store import TokenStore, open_store
from headlab.data.tokenizers import Tokenizer, load_tokenizer

__all__ = [
    "SPLITS",
    "Batch",
    "Corpus",
    "Dataset",
    "EvalBatches",
    "TokenStore",
    "Tokenizer",
    "TrainBatches",
    "cache_dir",
    "load_tokenizer",
    "open_corpus",
    "open_dataset",
    "open_store",
]


class Dataset(NamedTuple):
    """A corpus, the tokenizer that reads it, and its tokens."""

    corpus: Corpus
    tokenizer: Tokenizer
    store: TokenStore


def open_dataset(config: Any, *, progress: bool = True) -> Dataset:
    """What `config.corpus`, `.tokenizer` and `.vocab_size` name, built in the cache when missing.

    Errors are those of `open_corpus`, `load_tokenizer` and `open_store`. `progress` shows bars on a
    terminal.
    """
    corpus = open_corpus(config.corpus, progress=progress)
    tokenizer = load_tokenizer(corpus, config.vocab_size, config.tokenizer, progress=progress)
    return Dataset(corpus, tokenizer, open_store(corpus, tokenizer, progress=progress))
