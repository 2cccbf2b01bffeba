"""Byte-level BPE trained on a corpus (Sennrich et al. 2016; bytes as in GPT-2), or a given one."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headlab.data.cache import cache_dir, content_key, locked, new_directory, writing
from headlab.data.corpora import Corpus
from headlab.data.progress import track
from headlab.errors import UsageError

if TYPE_CHECKING:
    from jaxtyping import Int32

SEPARATOR = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # every byte, and the separator
_SEPARATORS = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|eot_id|>", "[SEP]")
_MIN_FREQUENCY = 2  # a pair of tokens is merged only if the train split has it twice
_logger = logging.getLogger(__name__)


def load_tokenizer(
    corpus: Corpus, vocab_size: int, path: str | Path | None = None, *, progress: bool = True
) -> Tokenizer:
    """The tokenizer in the file `path`, else one trained on the train split of `corpus`, once.

    Training is deterministic, and cached by the corpus, `vocab_size`, the settings and the version
    of the `tokenizers` library. A trained tokenizer has exactly `vocab_size` ids, the separator
    among them; a given one may have fewer.

    Raises:
      UsageError: `vocab_size` is below 257 or more than the train split supports (training), or
        less than the file's ids (given); the file isn't a tokenizer that can be used, see
        `Tokenizer`.
      HeadlabError: the cache can't be written.
    """
    if path is not None:
        return _given(Path(path), vocab_size)
    if vocab_size < SMALLEST_VOCABULARY:
        raise UsageError(
            f"data.vocab_size is {vocab_size}; a byte-level tokenizer needs at least "
            f"{SMALLEST_VOCABULARY}: the 256 bytes and the separator."
        )
    key = content_key(
        "byte-level-bpe",
        corpus.fingerprint,
        vocab_size,
        [SEPARATOR, _MIN_FREQUENCY],
        importlib.metadata.version("tokenizers"),
    )
    directory = cache_dir() / "tokenizers" / key
    if (cached := _cached(directory)) is not None:
        return cached
    with locked(directory):
        if (cached := _cached(directory)) is not None:
            return cached
        tokenizer = Tokenizer(_trained(corpus, vocab_size, progress))
        with new_directory(directory) as new:
            tokenizer.save(new / "tokenizer.json")
        return tokenizer


class Tokenizer:
    """Text to ids in `[0, vocab_size)` and back, and the id of the separator between documents.

    `definition` is the text of a tokenizer.json. Special tokens written out in a text, the
    separator's too, are encoded as the ordinary text they are: `encode` never gives `separator_id`.
    Nothing is added to a text (no post-processor), and nothing cut off it (a recorded truncation or
    padding is not applied). For byte-level tokenizers without a normaliser, all that are trained
    here, `decode(encode(text)) == text` for every text.

    Attributes: `vocab_size` (the highest id + 1), `separator_id`, `separator` (its spelling),
    `start_id` and `start` (what stands before a document: the separator, but in some published
    models another token, which is given here), and `fingerprint` (of the definition).

    Raises UsageError if the definition can't be read, drops merges at random, or has no usable
    separator, or `start_id` isn't the id of a special token.

    >>> import tokenizers
    >>> words = tokenizers.models.WordLevel({"the": 0, "sea": 1, "?": 2, SEPARATOR: 3}, unk_token="?")
    >>> words = tokenizers.Tokenizer(words)
    >>> words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    >>> tokenizer = Tokenizer(words.to_str())
    >>> tokenizer.encode("the sea is"), tokenizer.vocab_size, tokenizer.separator_id
    ([0, 1, 2], 4, 3)
    """

    def __init__(
        self, definition: str, source: str = "the tokenizer", *, start_id: int | None = None
    ):
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # the library raises bare Exception
            raise UsageError(
                f"{source} isn't a tokenizer.json of the tokenizers library ({error}); save one "
                "with Tokenizer.save, or leave data.tokenizer out to train one."
            ) from error
        self._definition = definition
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if getattr(self._tokenizer.model, "dropout", None):
            raise UsageError(
                f"{source} drops merges at random (model.dropout is "
                f"{self._tokenizer.model.dropout}), so that a text has no fixed tokens; set it to "
                "null."
            )
        self._ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.fingerprint = hashlib.sha256(definition.encode()).hexdigest()[:32]
        self.vocab_size = max(self._ids.values(), default=-1) + 1
        self.separator = self._find_separator(source)
        self.separator_id = self._ids[self.separator]
        self.start_id = self.separator_id if start_id is None else start_id
        if start_id is not None and start_id not in self._tokenizer.get_added_tokens_decoder():
            raise UsageError(
                f"{start_id!r} is to stand before documents, as bos_token_id in a config.json says, and "
                f"isn't the id of a special token in {source}."
            )
        self.start = self._tokenizer.id_to_token(self.start_id)

    def encode(self, text: str) -> list[int]:
        """The ids of one text; an empty text has none.

        Raises UsageError if a given tokenizer makes a separator of the text: trained ones never do.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, the same as `encode` gives, on all cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [encoding.ids for encoding in encodings]
        if any(self.separator_id in encoded for encoded in ids):
            raise UsageError(
                f"the tokenizer encodes {self.separator!r} in a text as the separator, so that a "
                "document would end itself; take it out of the text, or set "
                '"special": true for it in "added_tokens".'
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, separators written out; incomplete characters become U+FFFD."""
        return self._tokenizer.decode([int(id_) for id_ in ids], skip_special_tokens=False)

    def token_bytes(self, id_: int) -> bytes:
        """The UTF-8 bytes that a token stands for: none for special tokens and unused ids.

        Raises UsageError if `id_` isn't in `[0, vocab_size)` or the tokenizer isn't byte-level.
        """
        if not 0 <= id_ < self.vocab_size:
            raise UsageError(f"token id {id_} isn't in [0, {self.vocab_size}).")
        if not self.byte_level:
            raise UsageError(
                "only the tokens of a byte-level BPE tokenizer stand for bytes on their own; this "
                f"one is a {type(self._tokenizer.model).__name__} model."
            )
        added = self._tokenizer.get_added_tokens_decoder().get(id_)
        if added is not None:
            return b"" if added.special else added.content.encode()
        token = self._tokenizer.id_to_token(id_)
        return bytes(_BYTE_OF[character] for character in token or "")

    def token_lengths(self) -> Int32[np.ndarray, " vocab"] | None:
        """The bytes of each token, 0 for special ones; None if the tokenizer isn't byte-level."""
        if not self.byte_level:
            return None
        lengths = np.zeros(self.vocab_size, np.int32)
        for token, id_ in self._ids.items():
            lengths[id_] = len(token)  # byte-level spelling has a character a byte
        for id_, added in self._tokenizer.get_added_tokens_decoder().items():
            lengths[id_] = 0 if added.special else len(added.content.encode())
        return lengths

    @functools.cached_property
    def byte_level(self) -> bool:
        """Whether this is byte-level BPE, so that each token stands for a fixed string of bytes."""
        definition = json.loads(self._definition)
        decoder = definition.get("decoder") or {}
        kinds = {decoder.get("type")} | {part.get("type") for part in decoder.get("decoders", ())}
        vocabulary = definition["model"].get("vocab")
        added = {token["content"] for token in definition.get("added_tokens") or ()}
        return (
            "ByteLevel" in kinds
            and isinstance(vocabulary, dict)
            and all(set(token) <= _BYTE_OF.keys() for token in vocabulary if token not in added)
        )

    def save(self, path: str | Path) -> None:
        """Write the tokenizer.json; HeadlabError if that fails."""
        with writing(Path(path)):
            Path(path).write_text(self._definition, encoding="utf-8")

    def _find_separator(self, source: str) -> str:
        found = next((name for name in _SEPARATORS if name in self._ids), None)
        if found is None:
            raise UsageError(
                f"{source} has no token that can stand between documents "
                f"({', '.join(_SEPARATORS)}); add one with "
                f"Tokenizer.add_special_tokens(['{SEPARATOR}']) and save it again."
            )
        return found


def _given(path: Path, vocab_size: int) -> Tokenizer:
    try:
        definition = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read data.tokenizer {path} ({error}); give a tokenizer.json."
        ) from error
    tokenizer = Tokenizer(definition, source=str(path))
    if vocab_size < tokenizer.vocab_size:
        raise UsageError(
            f"data.vocab_size is {vocab_size}, but {path} has ids up to "
            f"{tokenizer.vocab_size - 1}: set it to {tokenizer.vocab_size} or more."
        )
    return tokenizer


def _cached(directory: Path) -> Tokenizer | None:
    file = directory / "tokenizer.json"
    if not file.exists():
        return None
    try:
        return Tokenizer(file.read_text(encoding="utf-8"), source=str(file))
    except (UsageError, UnicodeDecodeError):
        _logger.warning("the cached tokenizer %s is damaged; training it again", file)
        return None


def _trained(corpus: Corpus, vocab_size: int, progress: bool) -> str:
    """The definition of a byte-level BPE tokenizer trained on the train split."""
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers, trainers

    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=_MIN_FREQUENCY,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    documents = track(
        corpus.documents("train"),
        f"tokenizer: reading {corpus.name}",
        total=corpus.size_hint("train"),
        enabled=progress,
    )
    model.train_from_iterator(documents, trainer)
    largest = model.get_vocab_size()
    if largest < vocab_size:
        raise UsageError(
            f"data.vocab_size is {vocab_size}, but the train split of {corpus.name} supports "
            f"{largest} tokens at most (pairs that occur at least {_MIN_FREQUENCY} times): set "
            f"data.vocab_size to {largest} or less, or give more text."
        )
    return model.to_str(pretty=True)


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for (GPT-2's table).

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for the characters
    from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
