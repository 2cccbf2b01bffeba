"""The tokens of a corpus on disk: encoded once, then memory-mapped to train and evaluate on."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headlab.data.cache import cache_dir, content_key, locked, new_directory, writing
from headlab.data.corpora import Corpus
from headlab.data.progress import track
from headlab.data.splitting import SPLITS
from headlab.data.tokenizers import Tokenizer
from headlab.errors import UsageError

if TYPE_CHECKING:
    from jaxtyping import Int32, Int64, UInt

_FORMAT = 1  # grows with the layout of the files
_BATCH_DOCUMENTS = 512
_logger = logging.getLogger(__name__)


def open_store(corpus: Corpus, tokenizer: Tokenizer, *, progress: bool = True) -> TokenStore:
    """The store of `corpus` under `tokenizer`, built in the cache if it isn't there or is damaged.

    Processes that need the same store at once wait for one to build it. Building reads each split
    once, in batches, and holds none of it in memory.

    Raises:
      UsageError: a split has no documents, or the corpus can't be read (see its class).
      HeadlabError: the cache can't be written, as on a full disk; nothing incomplete is kept.
    """
    key = content_key("store", _FORMAT, corpus.fingerprint, tokenizer.fingerprint)
    directory = cache_dir() / "stores" / key
    if (store := _opened(directory)) is not None:
        return store
    with locked(directory):
        if (store := _opened(directory, warn=True)) is not None:
            return store
        with new_directory(directory) as new:
            _build(new, directory, corpus, tokenizer, progress)
        return TokenStore(directory)


class TokenStore:
    """A corpus as token streams: `SEP doc SEP doc SEP … doc SEP` a split.

    The first separator is context for the first document; every token after it is a target once.

    Attributes: `directory`; `counts`, how often each id is a target in train; `token_lengths`, the
    UTF-8 bytes of each token (0 for special ones), None if the tokenizer isn't byte-level; `meta`,
    all that was recorded.
    """

    counts: Int64[np.ndarray, " vocab"]
    token_lengths: Int32[np.ndarray, " vocab"] | None

    def __init__(self, directory: Path):
        self.directory = directory
        self.meta: dict[str, Any] = json.loads((directory / "meta.json").read_text())
        self.counts = _loaded(directory, "counts", self.meta["vocab_size"])
        self.token_lengths = None
        if self.meta["byte_level"]:
            self.token_lengths = _loaded(directory, "token_lengths", self.meta["vocab_size"])
        for split in SPLITS:
            expected = self.n_tokens(split) * np.dtype(self.meta["dtype"]).itemsize
            found = _tokens_file(directory, split).stat().st_size
            if found != expected:
                raise ValueError(f"{split}.bin has {found:,} bytes in place of {expected:,}")

    def tokens(self, split: str) -> UInt[np.ndarray, " tokens"]:
        """The stream of `split`, memory-mapped: uint16 for up to 65,536 ids, else uint32."""
        return np.memmap(_tokens_file(self.directory, split), self.meta["dtype"], mode="r")

    def n_tokens(self, split: str) -> int:
        """The length of the stream: one more than its targets."""
        return self.meta["splits"][split]["tokens"]

    def n_bytes(self, split: str) -> int:
        """The raw UTF-8 bytes of the documents of `split`: the divisor of bits per byte."""
        return self.meta["splits"][split]["bytes"]

    def n_documents(self, split: str) -> int:
        """The documents of `split`."""
        return self.meta["splits"][split]["documents"]


def _opened(directory: Path, warn: bool = False) -> TokenStore | None:
    if not directory.exists():
        return None
    try:
        return TokenStore(directory)
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        if warn:
            _logger.warning(
                "the token store %s is damaged (%s); building it again", directory, error
            )
        return None


def _loaded(directory: Path, name: str, length: int) -> np.ndarray:
    array = np.load(directory / f"{name}.npy", allow_pickle=False)
    if array.shape != (length,):
        raise ValueError(f"{name}.npy has shape {array.shape} in place of ({length},)")
    return array


def _tokens_file(directory: Path, split: str) -> Path:
    return directory / f"{split}.bin"


def _build(new: Path, final: Path, corpus: Corpus, tokenizer: Tokenizer, progress: bool) -> None:
    """Write all files of a store into `new`; messages name `final`, where they will be."""
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    lengths = tokenizer.token_lengths()
    counts = {split: np.zeros(tokenizer.vocab_size, np.int64) for split in SPLITS}
    splits: dict[str, dict[str, int]] = {}
    for split in SPLITS:
        documents = track(
            corpus.documents(split),
            f"tokens: encoding {split}",
            total=corpus.size_hint(split),
            enabled=progress,
        )
        file = _tokens_file(new, split)
        splits[split] = _write_stream(file, final, documents, tokenizer, dtype, counts[split])
    _check_filled(corpus, splits)
    if lengths is not None:
        for split in SPLITS:
            splits[split]["token_bytes"] = int(counts[split] @ lengths.astype(np.int64))
        _check_bytes(corpus, splits)
    meta = {
        "format": _FORMAT,
        "corpus": corpus.name,
        "corpus_fingerprint": corpus.fingerprint,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "separator_id": tokenizer.separator_id,
        "byte_level": lengths is not None,
        "dtype": dtype.str,
        "splits": splits,
    }
    with writing(final):
        np.save(new / "counts.npy", counts["train"])
        if lengths is not None:
            np.save(new / "token_lengths.npy", lengths)
        (new / "meta.json").write_text(json.dumps(meta, indent=1))


def _write_stream(
    file: Path,
    final: Path,
    documents: Iterator[str],
    tokenizer: Tokenizer,
    dtype: np.dtype,
    counts: np.ndarray,
) -> dict[str, int]:
    """Write one stream, add its targets to `counts`, and count documents, bytes and tokens."""
    separator = tokenizer.separator_id
    n_documents, n_bytes, n_tokens = 0, 0, 1
    _append(file, final, np.array([separator], dtype))
    while batch := list(itertools.islice(documents, _BATCH_DOCUMENTS)):
        ids = [id_ for encoded in tokenizer.encode_batch(batch) for id_ in (*encoded, separator)]
        targets = np.array(ids, np.int64)
        counts += np.bincount(targets, minlength=len(counts))
        n_documents += len(batch)
        n_bytes += sum(len(document.encode()) for document in batch)
        n_tokens += len(targets)
        _append(file, final, targets.astype(dtype))
    return {"documents": n_documents, "bytes": n_bytes, "tokens": n_tokens}


def _append(file: Path, final: Path, array: np.ndarray) -> None:
    with writing(final), file.open("ab") as stream:
        stream.write(array.tobytes())


def _check_filled(corpus: Corpus, splits: dict[str, dict[str, int]]) -> None:
    empty = [split for split in SPLITS if not splits[split]["documents"]]
    if empty:
        total = sum(counted["documents"] for counted in splits.values())
        raise UsageError(
            f"the {' and '.join(empty)} split of {corpus.name} has none of its {total:,} "
            "documents; give a corpus with more text, or a dataset that has the split."
        )


def _check_bytes(corpus: Corpus, splits: dict[str, dict[str, int]]) -> None:
    """Say so if the tokens don't spell the text: bits per byte are of the text in any case."""
    for split, counted in splits.items():
        if counted["token_bytes"] != counted["bytes"]:
            _logger.warning(
                "the tokens of the %s split of %s spell %s bytes, its text has %s: the tokenizer "
                "changes the text (a normaliser, a prefix space), so that bits per byte compare "
                "only roughly with other tokenizers'",
                split,
                corpus.name,
                f"{counted['token_bytes']:,}",
                f"{counted['bytes']:,}",
            )
