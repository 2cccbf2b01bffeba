"""Local UTF-8 text files as a corpus: `text:GLOB`, one file or many."""

from __future__ import annotations

import codecs
import functools
import glob
import hashlib
from collections.abc import Iterator
from pathlib import Path

from headlab.data.cache import content_key
from headlab.data.splitting import SPLITS, pieces, split_of
from headlab.errors import HeadlabError, UsageError

DOCUMENT_CHARACTERS = 2000
_RULE = 1  # grows when files are cut in another way, so that old stores aren't taken for new
_CHUNK_BYTES = 1 << 20


class TextFiles:
    """The files that match a pattern (`**` crosses directories), in the order of their paths.

    Each file is cut into documents of 1,000 to 2,000 characters, at blank lines where it has them
    (see `splitting.pieces`); only a file's last document may be shorter. A document's split is that
    of its content (`splitting.split_of`). The documents of all splits, in order, are the text of
    the files exactly, line endings included; a leading byte-order mark isn't text, and is dropped.

    The fingerprint covers the contents and their order, not the names: files that move keep their
    caches.

    Raises UsageError if nothing matches, all files are empty, or a file isn't UTF-8 (naming the
    byte).
    """

    def __init__(self, pattern: str):
        self.name = f"text:{pattern}"
        self._paths = _matches(pattern)
        self._digests, lengths = zip(*map(_digest_and_length, self._paths), strict=True)
        if not any(lengths):
            raise UsageError(
                f"{self.name}: the {_files(self._paths)} that match are empty; give files with "
                "text."
            )
        self.fingerprint = content_key("text", _RULE, DOCUMENT_CHARACTERS, self._digests)

    def documents(self, split: str) -> Iterator[str]:
        """The documents of `split`, in the order of the files.

        Raises UsageError if a split has none, HeadlabError if a file is no longer what it was when
        the corpus opened.
        """
        self._check_splits()
        return (text for text in self._all_documents() if split_of(text) == split)

    def size_hint(self, split: str) -> int | None:
        """The number of documents in `split`."""
        self._check_splits()
        return self._counts[split]

    def _check_splits(self) -> None:
        empty = [split for split in SPLITS if not self._counts[split]]
        if empty:
            total = sum(self._counts.values())
            raise UsageError(
                f"{self.name}: the {_files(self._paths)} hold {total:,} documents of about "
                f"{DOCUMENT_CHARACTERS:,} characters, and none of them falls into the "
                f"{' or '.join(empty)} split (2% each, by a hash of the text). Give more text: 400 "
                "documents, about 600 kB, all but surely fill both splits."
            )

    @functools.cached_property
    def _counts(self) -> dict[str, int]:
        counts = dict.fromkeys(SPLITS, 0)
        for text in self._all_documents():
            counts[split_of(text)] += 1
        return counts

    def _all_documents(self) -> Iterator[str]:
        for path, digest in zip(self._paths, self._digests, strict=True):
            hasher = hashlib.sha256()
            yield from pieces(_decoded(path, hasher), DOCUMENT_CHARACTERS)
            if hasher.hexdigest() != digest:
                raise HeadlabError(
                    f"{path} changed while it was being read; start again once it stays as it is."
                )


def _matches(pattern: str) -> list[Path]:
    expanded = str(Path(pattern).expanduser()) if pattern else ""
    # A path that exists is meant as it stands, even if it has brackets or a star in it.
    names = [expanded] if Path(expanded).is_file() else glob.glob(expanded, recursive=True)
    paths = sorted(Path(name) for name in names if Path(name).is_file())
    if not paths:
        raise UsageError(
            f"text:{pattern} matches no file (from {Path.cwd()}). Give the path of a file or a "
            "pattern of files, such as text:books/**/*.txt, in quotes so that the shell leaves it "
            "alone."
        )
    return paths


def _files(paths: list[Path]) -> str:
    return f"file {paths[0]}" if len(paths) == 1 else f"{len(paths):,} files"


def _digest_and_length(path: Path) -> tuple[str, int]:
    """The SHA-256 of a file's bytes, and the characters of its text."""
    hasher = hashlib.sha256()
    length = sum(map(len, _decoded(path, hasher)))
    return hasher.hexdigest(), length


def _decoded(path: Path, hasher: hashlib._Hash) -> Iterator[str]:
    """The text of a file in chunks, its raw bytes going through `hasher`."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    position = 0
    try:
        with path.open("rb") as file:
            while True:
                chunk = file.read(_CHUNK_BYTES)
                hasher.update(chunk)
                pending = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(chunk, final=not chunk)
                except UnicodeDecodeError as error:
                    raise _not_utf8(path, position - pending + error.start, error) from None
                if position == 0:
                    text = text.removeprefix("\ufeff")
                position += len(chunk)
                if text:
                    yield text
                if not chunk:
                    return
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}; make it readable or leave it out."
        ) from error


def _not_utf8(path: Path, offset: int, error: UnicodeDecodeError) -> UsageError:
    byte = error.object[error.start]
    utf16 = offset == 0 and error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    source = "UTF-16" if utf16 else "ISO-8859-1"
    return UsageError(
        f"{path} isn't UTF-8 text: byte 0x{byte:02x} at offset {offset:,} ({error.reason}). "
        f"Convert it, for example with `iconv -f {source} -t UTF-8 {path}` if that is its "
        "encoding, or leave the file out."
    )
