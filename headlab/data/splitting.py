"""Where a long text is cut into documents, and which split each belongs to, by its text alone."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator

SPLITS = ("train", "validation", "test")

# Where a text may be cut, the best kind of place first: after a blank line, a line, a sentence, a
# word. White space stays with the text before it, so that the next document opens with a word.
_BOUNDARIES = (
    re.compile(r"\n[^\S\n]*\n\s*"),
    re.compile(r"\n\s*"),
    re.compile(r"[.!?][\"'`’”)\]]*\s+"),
    re.compile(r"\s+"),
)


def split_of(document: str) -> str:
    """`"validation"` for 2% of texts, `"test"` for 2%, else `"train"`, by a hash of the text.

    The hash is SHA-256 of the UTF-8 bytes. A document keeps its split whatever stands before or
    after it, and copies of it share one split.
    """
    share = int.from_bytes(hashlib.sha256(document.encode()).digest()[:8], "big") % 100
    if share < 2:
        return "validation"
    return "test" if share < 4 else "train"


def pieces(chunks: Iterable[str], size: int) -> Iterator[str]:
    """Cut the text made of `chunks` into documents of `size`/2 to `size` characters.

    Only the last may be shorter. Each cut falls at the last blank line in reach, else the last line
    end, sentence end or space, else at `size` characters. The documents joined are the text again,
    and don't depend on how it came in chunks.
    """
    buffer = ""
    for chunk in chunks:
        buffer += chunk
        start = 0
        while len(buffer) - start > size:
            end = start + _cut(buffer[start : start + size])
            yield buffer[start:end]
            start = end
        buffer = buffer[start:]
    if buffer:
        yield buffer


def _cut(window: str) -> int:
    """The length of the document that begins `window`, from half of it to all of it."""
    half = len(window) // 2
    for boundary in _BOUNDARIES:
        end = max((match.end() for match in boundary.finditer(window)), default=0)
        if end >= half:
            return end
    return len(window)
