"""`text:GLOB` reads every character of its files once, and says what is wrong with the others."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from headlab.data import open_corpus
from headlab.data.splitting import SPLITS, split_of
from headlab.errors import HeadlabError, UsageError


def _book(seed: int, characters: int, end: str = "\n") -> str:
    rng = random.Random(seed)
    parts, length = [], 0
    while length < characters:
        words = ("".join(rng.choices("abcdeéü日🙂", k=rng.randrange(1, 9))) for _ in range(40))
        parts.append(" ".join(words) + "." + rng.choice([" ", end, end + end]))
        length += len(parts[-1])
    return "".join(parts)


@pytest.fixture
def books(tmp_path: Path) -> Path:
    """Files in two directories: two kinds of line ends, a byte-order mark, an empty file."""
    directory = tmp_path / "books"
    (directory / "sub").mkdir(parents=True)
    (directory / "a.txt").write_bytes(_book(0, 500_000).encode())
    (directory / "b.txt").write_bytes(b"\xef\xbb\xbf" + _book(1, 60_000, "\r\n").encode())
    (directory / "c.txt").write_bytes(b"")
    (directory / "sub" / "d.txt").write_bytes(b"  \n\nno end of line")
    return directory


def _text(directory: Path) -> str:
    paths = sorted(directory.rglob("*.txt"))
    return "".join(path.read_bytes().decode("utf-8-sig") for path in paths)


def test_the_documents_of_all_splits_are_the_text_of_the_files(books: Path):
    corpus = open_corpus(f"text:{books}/**/*.txt")
    streams = {split: list(corpus.documents(split)) for split in SPLITS}
    rest = _text(books)
    n_bytes = sum(len(text.encode()) for texts in streams.values() for text in texts)
    assert n_bytes == len(rest.encode())
    heads = dict.fromkeys(SPLITS, 0)
    while rest:  # the next document of the text is the next one of one of the splits
        split = next(
            split
            for split in SPLITS
            if heads[split] < len(streams[split]) and rest.startswith(streams[split][heads[split]])
        )
        rest = rest.removeprefix(streams[split][heads[split]])
        heads[split] += 1
    assert heads == {split: len(texts) for split, texts in streams.items()}
    assert heads == {split: corpus.size_hint(split) for split in SPLITS}


def test_every_document_is_in_the_split_of_its_content(books: Path):
    corpus = open_corpus(f"text:{books}/**/*.txt")
    for split in SPLITS:
        documents = list(corpus.documents(split))
        assert documents
        assert {split_of(document) for document in documents} == {split}


def test_a_file_of_its_own_name_is_read_even_if_the_name_is_a_pattern(tmp_path: Path):
    (tmp_path / "[1].txt").write_text(_book(0, 500_000))
    assert open_corpus(f"text:{tmp_path}/[1].txt").size_hint("train")


def test_the_fingerprint_is_of_the_content_not_of_the_names(books: Path):
    before = open_corpus(f"text:{books}/**/*.txt").fingerprint
    moved = books.rename(books.with_name("moved"))
    assert open_corpus(f"text:{moved}/**/*.txt").fingerprint == before
    (moved / "sub" / "d.txt").write_bytes(b"  \n\nno end of lime")
    assert open_corpus(f"text:{moved}/**/*.txt").fingerprint != before
    assert open_corpus(f"text:{moved}/*.txt").fingerprint != before


@pytest.mark.parametrize(
    ("before", "bad", "offset"),
    [
        (b"", b"\xff", 0),
        (b"good \xe6\x97\xa5 ", b"\x80 more", 9),
        (b"\xef\xbb\xbfmark ", b"\xe6\x97", 8),  # cut off in a character at the end of the file
        (b"x" * (1 << 20), b"\xc3(", 1 << 20),
        (b"x" * ((1 << 20) - 1), b"\xc3(", (1 << 20) - 1),  # across two chunks
    ],
)
def test_a_bad_byte_is_named_with_its_file_and_offset(
    tmp_path: Path, before: bytes, bad: bytes, offset: int
):
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "poor.txt").write_bytes(before + bad)
    with pytest.raises(UsageError, match=rf"poor\.txt isn't UTF-8 .* offset {offset:,} ") as error:
        open_corpus(f"text:{tmp_path}/*.txt")
    assert f"0x{bad[0]:02x}" in str(error.value)


def test_utf16_is_recognised_and_the_fix_told(tmp_path: Path):
    (tmp_path / "wide.txt").write_bytes("text".encode("utf-16"))
    with pytest.raises(UsageError, match="iconv -f UTF-16 -t UTF-8"):
        open_corpus(f"text:{tmp_path}/wide.txt")


def test_a_pattern_without_files_is_refused(tmp_path: Path):
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(UsageError, match="matches no file"):
        open_corpus(f"text:{tmp_path}/*.txt")


def test_empty_files_alone_are_refused(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(UsageError, match="the 2 files that match are empty"):
        open_corpus(f"text:{tmp_path}/*.txt")


def test_a_text_too_small_to_split_is_refused_with_its_number_of_documents(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one.\n" * 1000)  # 5,000 characters, three documents
    corpus = open_corpus(f"text:{tmp_path}/a.txt")
    with pytest.raises(UsageError, match=r"3 documents .* validation or test split"):
        corpus.documents("train")


def test_a_file_that_changes_while_it_is_read_is_an_error(books: Path):
    corpus = open_corpus(f"text:{books}/*.txt")
    assert corpus.size_hint("train")
    with (books / "b.txt").open("a") as file:
        file.write("more")
    with pytest.raises(HeadlabError, match=r"b\.txt changed"):
        list(corpus.documents("train"))


@pytest.mark.parametrize("name", ["", "wiki", "text:", "tfds:", "Text:a.txt", "headlab_english:x"])
def test_an_unknown_corpus_is_refused_with_the_kinds_there_are(name: str):
    with pytest.raises(UsageError, match=r"headlab_english, text:GLOB .* tfds:NAME"):
        open_corpus(name)
