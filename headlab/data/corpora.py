"""Corpora by name: what all of them offer, and how one is opened."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from headlab.errors import UsageError


class Corpus(Protocol):
    """A text cut into documents, each in one of the splits `"train"`, `"validation"`, `"test"`.

    `fingerprint` names the content and the rule that made documents of it: equal fingerprints,
    equal documents.
    """

    name: str
    fingerprint: str

    def documents(self, split: str) -> Iterator[str]:
        """The documents of `split` in a fixed order, none of them empty."""

    def size_hint(self, split: str) -> int | None:
        """About how many documents `split` has, for progress; None where that isn't known."""


def open_corpus(name: str, *, progress: bool = True) -> Corpus:
    """The corpus of a name: `headlab_english`, `text:GLOB` or `tfds:NAME`.

    Raises UsageError for any other name, and where the files or the dataset can't be used (see each
    class).
    """
    kind, _, rest = name.partition(":")
    if name == "headlab_english":
        from headlab.data.english_corpus import EnglishCorpus

        return EnglishCorpus(progress=progress)
    if kind == "text" and rest:
        from headlab.data.text_files import TextFiles

        return TextFiles(rest)
    if kind == "tfds" and rest:
        from headlab.data.tfds_corpus import TfdsCorpus

        return TfdsCorpus(rest)
    raise UsageError(
        f"unknown corpus {name!r}: give headlab_english, text:GLOB for local files "
        "(text:books/*.txt), or tfds:NAME for a TensorFlow dataset (tfds:wiki40b/en)."
    )
