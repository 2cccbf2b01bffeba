"""A token store holds every document once, is whole or absent, and is built by one process."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers as library
from tokenizers import decoders, models, normalizers, pre_tokenizers

from headlab.data import Tokenizer, TokenStore, load_tokenizer, open_store
from headlab.data.splitting import SPLITS
from headlab.errors import HeadlabError, UsageError


@pytest.fixture
def tokenizer(small_corpus) -> Tokenizer:
    tokenizer = load_tokenizer(small_corpus, 300)
    small_corpus.reads = dict.fromkeys(SPLITS, 0)
    return tokenizer


def test_a_stream_is_documents_between_separators(small_corpus, tokenizer):
    store = open_store(small_corpus, tokenizer)
    for split in SPLITS:
        expected = [tokenizer.separator_id]
        for document in small_corpus.splits[split]:
            expected += [*tokenizer.encode(document), tokenizer.separator_id]
        stream = store.tokens(split)
        assert stream.dtype == np.uint16
        assert stream.tolist() == expected
        assert store.n_tokens(split) == len(expected)
        assert store.n_documents(split) == len(small_corpus.splits[split])
        assert not stream.flags.writeable


def test_counts_are_of_the_targets_of_train(small_corpus, tokenizer):
    store = open_store(small_corpus, tokenizer)
    counted = Counter(store.tokens("train")[1:].tolist())
    assert store.counts.dtype == np.int64
    assert store.counts.tolist() == [counted[id_] for id_ in range(300)]
    assert store.counts.sum() == store.n_tokens("train") - 1


def test_bytes_are_of_the_raw_text_and_the_tokens_have_them_all(small_corpus, tokenizer):
    store = open_store(small_corpus, tokenizer)
    for split in SPLITS:
        raw = sum(len(document.encode()) for document in small_corpus.splits[split])
        assert store.n_bytes(split) == raw
        assert store.token_lengths[store.tokens(split)].sum() == raw


def test_a_store_is_built_once_for_equal_inputs(small_corpus, tokenizer):
    first = open_store(small_corpus, tokenizer)
    second = open_store(small_corpus, tokenizer)
    assert first.directory == second.directory
    assert small_corpus.reads == dict.fromkeys(SPLITS, 1)
    other = open_store(small_corpus, load_tokenizer(small_corpus, 290))
    assert other.directory != first.directory


def test_ids_beyond_16_bits_are_stored_in_32():
    corpus_words = {f"w{number}": number + 1 for number in range(70_000)}
    words = library.Tokenizer(
        models.WordLevel({"</s>": 0, **corpus_words, "?": 70_001}, unk_token="?")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["</s>"])
    tokenizer = Tokenizer(words.to_str())
    corpus = _corpus(train=["w0 w65535 w69999"], validation=["w5"], test=["w6"])
    store = open_store(corpus, tokenizer)
    assert store.tokens("train").dtype == np.uint32
    assert store.tokens("train").tolist() == [0, 1, 65_536, 70_000, 0]
    assert store.token_lengths is None


def _corpus(**splits):
    return SimpleNamespace(
        name="memory",
        fingerprint=json.dumps(splits),
        documents=lambda split: iter(splits[split]),
        size_hint=lambda split: None,
    )


def test_a_tokenizer_that_changes_the_text_is_told(caplog):
    made = library.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.normalizer = normalizers.Lowercase()
    made.add_tokens(list(pre_tokenizers.ByteLevel.alphabet()))
    alphabet = {char: id_ for id_, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    definition = json.loads(made.to_str())
    definition["model"]["vocab"] = alphabet
    definition["added_tokens"] = []
    made = library.Tokenizer.from_str(json.dumps(definition))
    made.add_special_tokens(["</s>"])
    corpus = _corpus(train=["plain"], validation=["plain"], test=["İ"])  # lower case is a byte more
    store = open_store(corpus, Tokenizer(made.to_str()))
    assert store.n_bytes("test") == 2
    assert "tokens of the test split of memory spell 3 bytes, its text has 2" in caplog.text
    assert "train split" not in caplog.text


@pytest.mark.parametrize("empty", SPLITS)
def test_a_split_without_documents_is_refused(small_corpus, tokenizer, empty: str, cache: Path):
    small_corpus.splits[empty] = []
    with pytest.raises(UsageError, match=f"the {empty} split of memory has none of its"):
        open_store(small_corpus, tokenizer)
    assert _names(cache / "stores") == []


def _names(directory: Path) -> list[str]:
    """What is in a directory of the cache beside its lock files."""
    return sorted(path.name for path in directory.iterdir() if path.suffix != ".lock")


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("train.bin", lambda data: data[:-2]),
        ("validation.bin", lambda data: data + b"\0\0"),
        ("meta.json", lambda data: data[: len(data) // 2]),
        ("meta.json", lambda data: b"{}"),
        ("counts.npy", lambda data: data[:-8]),
        ("token_lengths.npy", lambda data: b""),
        ("test.bin", None),
    ],
)
def test_a_damaged_store_is_built_again_with_a_warning(
    small_corpus, tokenizer, file: str, damage, caplog
):
    store = open_store(small_corpus, tokenizer)
    whole = {path.name: path.read_bytes() for path in store.directory.iterdir()}
    path = store.directory / file
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(whole[file]))
    again = open_store(small_corpus, tokenizer)
    assert f"{store.directory} is damaged" in caplog.text
    assert {path.name: path.read_bytes() for path in again.directory.iterdir()} == whole


def test_an_error_of_the_corpus_leaves_no_store(small_corpus, tokenizer, cache: Path):
    def fails(split):
        yield from small_corpus.splits[split]
        if split == "test":
            raise HeadlabError("the file changed")

    small_corpus.documents = fails
    with pytest.raises(HeadlabError, match="the file changed"):
        open_store(small_corpus, tokenizer)
    assert _names(cache / "stores") == []


@pytest.mark.parametrize("moment", ["write", "flush"])
def test_a_full_disk_is_an_error_that_names_the_place_and_leaves_no_store(
    small_corpus, tokenizer, cache: Path, monkeypatch, moment: str
):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(*args, **kwargs):
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(*((np, "save") if moment == "write" else (os, "fsync")), refuse)
        with pytest.raises(
            HeadlabError, match="cannot write .*stores.*: the disk is full"
        ) as error:
            open_store(small_corpus, tokenizer)
    assert not isinstance(error.value, UsageError)
    assert "HEADLAB_CACHE" in str(error.value)
    assert _names(cache / "stores") == []
    assert open_store(small_corpus, tokenizer).n_documents("train") == 300


def test_a_cache_that_cannot_be_written_is_an_error_that_names_it(
    small_corpus, tokenizer, tmp_path: Path, monkeypatch
):
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("HEADLAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(HeadlabError, match=r"cannot write .*file/stores/.* set HEADLAB_CACHE"):
        open_store(small_corpus, tokenizer)


# A process that opens a store of a slow corpus; it writes a file when it begins to read a split.
_BUILDER = """
import json, sys, time
from pathlib import Path
from types import SimpleNamespace
from headlab.data import Tokenizer, open_store

directory, seconds = Path(sys.argv[1]), float(sys.argv[2])
splits = json.loads((directory / "splits.json").read_text())

def documents(split):
    with (directory / "reads").open("a") as file:
        file.write(split + "\\n")
    for document in splits[split]:
        yield document
        time.sleep(seconds)

corpus = SimpleNamespace(name="slow", fingerprint="slow", documents=documents,
                         size_hint=lambda split: None)
store = open_store(corpus, Tokenizer((directory / "tokenizer.json").read_text()))
print(store.directory, int(store.tokens("train").sum()), store.n_tokens("test"))
"""


@pytest.fixture
def builder(small_corpus, tokenizer, tmp_path: Path):
    """Starts a process that builds the store of `small_corpus`, so many seconds a document."""
    tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "splits.json").write_text(json.dumps(small_corpus.splits))
    started = []

    def start(seconds: float) -> subprocess.Popen:
        command = [sys.executable, "-c", _BUILDER, str(tmp_path), str(seconds)]
        environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)


def test_processes_that_build_at_once_end_with_one_good_store(builder, tmp_path, cache: Path):
    processes = [builder(0.003) for _ in range(3)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    assert (tmp_path / "reads").read_text().split() == list(SPLITS)  # one process built it
    assert "Traceback" not in "".join(err for _, err in outputs)
    (name,) = _names(cache / "stores")
    assert TokenStore(cache / "stores" / name).n_documents("train") == 300


def test_a_builder_killed_half_way_leaves_nothing_that_counts(builder, tmp_path, cache: Path):
    killed = builder(0.05)
    _wait_for(tmp_path / "reads")
    waiting = builder(0)
    time.sleep(0.5)
    killed.send_signal(signal.SIGKILL)
    out, err = waiting.communicate(timeout=120)
    assert waiting.returncode == 0, err
    assert killed.wait() == -signal.SIGKILL
    (name,) = _names(cache / "stores")  # what the killed one had begun is gone
    assert out.split()[0] == str(cache / "stores" / name)
    assert TokenStore(cache / "stores" / name).n_documents("validation") == 40
