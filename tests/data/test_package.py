"""The package is quick to import, and `open_dataset` puts its parts together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from headlab.data import cache_dir, open_dataset
from headlab.data.splitting import SPLITS


def test_importing_data_imports_neither_jax_nor_tfds():
    code = (
        "import sys, headlab.data; print([m for m in "
        "('jax', 'flax', 'tensorflow', 'tensorflow_datasets', 'tokenizers', 'rich') "
        "if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HEADLAB_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("HEADLAB_CACHE")
    assert cache_dir() == tmp_path / "shared" / "headlab"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "headlab"


def test_a_dataset_of_local_text_has_all_of_its_bytes(tmp_path: Path):
    lines = [f"Line {number} of the text, {number % 7} again.\n" for number in range(20_000)]
    (tmp_path / "a.txt").write_text("".join(lines))
    config = SimpleNamespace(corpus=f"text:{tmp_path}/*.txt", tokenizer=None, vocab_size=300)
    corpus, tokenizer, store = open_dataset(config)
    assert tokenizer.vocab_size == len(store.counts) == 300
    assert sum(store.n_bytes(split) for split in SPLITS) == (tmp_path / "a.txt").stat().st_size
    document = next(corpus.documents("validation"))
    stream = store.tokens("validation")
    expected = [tokenizer.separator_id, *tokenizer.encode(document), tokenizer.separator_id]
    assert stream[: len(expected)].tolist() == expected
    again = open_dataset(config)
    assert again.store.directory == store.directory
    assert again.tokenizer.fingerprint == tokenizer.fingerprint
