"""Tokenizers lose no byte of a text, invent no separator, and are the same at each training."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers as library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from headlab.data import Tokenizer, load_tokenizer
from headlab.data.tokenizers import SEPARATOR
from headlab.errors import HeadlabError, UsageError

TEXTS = [
    "",
    " ",
    "\n\n \t\r\n",
    "plain words, and 12345 numbers.",
    "  spaces   in a row  ",
    f"a text with {SEPARATOR} in it{SEPARATOR}",
    "Grüße, 世界 🙂👩‍👩‍👧 e\u0301 \ufeff \u0000 \u202e",
    "".join(chr(code) for code in range(0x250)),
    "Ġ Ċ ▁ <0x0A> </s>",
]


@pytest.fixture
def tokenizer(small_corpus) -> Tokenizer:
    return load_tokenizer(small_corpus, 300)


def _byte_level(
    words: list[str] | None = None, special: list[str] | None = None, **vocabulary
) -> library.Tokenizer:
    """A byte-level BPE tokenizer as other tools make them."""
    made = library.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["</s>"] if special is None else special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        **vocabulary,
    )
    made.train_from_iterator(words or ["low lower lowest newest widest"] * 5, trainer)
    return made


def _saved(made: library.Tokenizer, tmp_path: Path) -> Path:
    path = tmp_path / "given.json"
    made.save(str(path))
    return path


def test_decoding_gives_back_any_text(tokenizer: Tokenizer):
    rng = random.Random(0)
    every = [chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c < 0xE000]
    texts = [*TEXTS, *("".join(rng.choices(every, k=200)) for _ in range(50))]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids == tokenizer.encode(text)
        assert tokenizer.decode(ids) == text


def test_no_text_encodes_to_the_separator(tokenizer: Tokenizer):
    for text in TEXTS:
        assert tokenizer.separator_id not in tokenizer.encode(text)
    assert tokenizer.decode([tokenizer.separator_id]) == tokenizer.separator == SEPARATOR


def test_the_bytes_of_tokens_are_the_bytes_of_the_text(tokenizer: Tokenizer):
    lengths = tokenizer.token_lengths()
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert b"".join(tokenizer.token_bytes(id_) for id_ in ids) == text.encode()
        assert lengths[ids].sum() == len(text.encode())
    assert tokenizer.token_bytes(tokenizer.separator_id) == b""
    assert lengths[tokenizer.separator_id] == 0
    assert lengths.tolist() == [len(tokenizer.token_bytes(id_)) for id_ in range(300)]


def test_a_trained_tokenizer_has_exactly_the_ids_asked_for(tokenizer: Tokenizer):
    assert tokenizer.vocab_size == 300
    spelled = {tokenizer.token_bytes(id_) for id_ in range(300)}
    assert len(spelled) == 300  # all different: 256 bytes, 43 merges, the empty separator
    assert {bytes([byte]) for byte in range(256)} <= spelled


def test_training_sees_the_train_split_alone(small_corpus, memory_corpus):
    with_other = {**small_corpus.splits, "validation": ["zqzqzq " * 50] * 99, "test": ["x"]}
    other = memory_corpus(**with_other)
    assert load_tokenizer(small_corpus, 300).fingerprint == load_tokenizer(other, 300).fingerprint
    assert other.reads == {"train": 1, "validation": 0, "test": 0}


def test_training_again_in_another_process_gives_the_same_tokenizer(
    tokenizer: Tokenizer, small_corpus, tmp_path: Path
):
    (tmp_path / "train.json").write_text(json.dumps(small_corpus.splits["train"]))
    code = f"""
import json, os
from types import SimpleNamespace
os.environ["HEADLAB_CACHE"] = {str(tmp_path / "elsewhere")!r}
from headlab.data import load_tokenizer
documents = json.load(open({str(tmp_path / "train.json")!r}))
corpus = SimpleNamespace(name="other", fingerprint="other", size_hint=lambda split: None,
                         documents=lambda split: iter(documents))
print(load_tokenizer(corpus, 300).fingerprint)
"""
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
        )
        assert run.stdout.strip() == tokenizer.fingerprint


def test_a_tokenizer_is_trained_once_for_equal_inputs(small_corpus, memory_corpus):
    first = load_tokenizer(small_corpus, 300)
    assert load_tokenizer(small_corpus, 300).fingerprint == first.fingerprint
    assert small_corpus.reads["train"] == 1
    load_tokenizer(small_corpus, 299)
    assert small_corpus.reads["train"] == 2
    changed = memory_corpus(**{**small_corpus.splits, "train": small_corpus.splits["train"][:-1]})
    load_tokenizer(changed, 300)
    assert changed.reads["train"] == 1


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff"])
def test_a_damaged_cached_tokenizer_is_trained_again(small_corpus, cache: Path, damage, caplog):
    first = load_tokenizer(small_corpus, 300)
    (file,) = cache.glob("tokenizers/*/tokenizer.json")
    file.write_bytes(damage)
    assert load_tokenizer(small_corpus, 300).fingerprint == first.fingerprint
    assert "damaged" in caplog.text


def test_a_vocabulary_beyond_the_corpus_is_refused_with_the_largest_that_works(small_corpus):
    with pytest.raises(UsageError, match=r"data.vocab_size is 50000.* (\d+) or less") as error:
        load_tokenizer(small_corpus, 50_000)
    largest = int(str(error.value).split("set data.vocab_size to ")[1].split()[0])
    assert load_tokenizer(small_corpus, largest).vocab_size == largest
    with pytest.raises(UsageError, match=f"supports {largest} tokens"):
        load_tokenizer(small_corpus, largest + 1)


@pytest.mark.parametrize("vocab_size", [-1, 0, 256])
def test_a_vocabulary_below_257_is_refused(small_corpus, vocab_size):
    with pytest.raises(UsageError, match=f"vocab_size is {vocab_size}; .* at least 257"):
        load_tokenizer(small_corpus, vocab_size)


def test_the_smallest_vocabulary_is_bytes_and_the_separator(small_corpus):
    tokenizer = load_tokenizer(small_corpus, 257)
    assert sorted(map(tokenizer.token_bytes, range(257)))[1:] == [bytes([b]) for b in range(256)]


def test_errors_of_the_corpus_pass_through_training_unchanged(small_corpus):
    def fails(split):
        yield "text"
        raise HeadlabError("the file changed")

    small_corpus.documents = fails
    with pytest.raises(HeadlabError, match="^the file changed$"):
        load_tokenizer(small_corpus, 257)


def test_a_given_tokenizer_is_used_and_its_content_is_its_fingerprint(small_corpus, tmp_path):
    path = _saved(_byte_level(), tmp_path)
    given = load_tokenizer(small_corpus, 1000, path)
    assert small_corpus.reads["train"] == 0
    assert given.separator == "</s>"
    assert given.vocab_size == library.Tokenizer.from_file(str(path)).get_vocab_size()
    for text in TEXTS:
        assert given.decode(given.encode(text)) == text
    again = load_tokenizer(small_corpus, 1000, str(path))
    other = load_tokenizer(small_corpus, 1000, _saved(_byte_level(["xyz xyz"]), tmp_path))
    assert given.fingerprint == again.fingerprint != other.fingerprint


def test_saving_writes_the_same_tokenizer(tokenizer: Tokenizer, small_corpus, tmp_path):
    tokenizer.save(tmp_path / "saved.json")
    loaded = load_tokenizer(small_corpus, 300, tmp_path / "saved.json")
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.encode(TEXTS[6]) == tokenizer.encode(TEXTS[6])


def test_a_given_tokenizer_cuts_pads_and_adds_nothing(small_corpus, tmp_path: Path):
    made = _byte_level(special=["</s>", "[CLS]"])
    plain = made.encode("low lower lowest " * 20, add_special_tokens=False).ids
    made.enable_truncation(4)
    made.enable_padding(length=500)
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A </s>", special_tokens=[("[CLS]", 1), ("</s>", 0)]
    )
    given = load_tokenizer(small_corpus, 1000, _saved(made, tmp_path))
    assert given.encode("low lower lowest " * 20) == plain
    assert given.encode_batch(["low lower lowest " * 20, "low"])[0] == plain


def test_a_given_tokenizer_larger_than_the_vocabulary_is_refused(small_corpus, tmp_path: Path):
    path = _saved(_byte_level(), tmp_path)
    n = load_tokenizer(small_corpus, 1000, path).vocab_size
    assert load_tokenizer(small_corpus, n, path).vocab_size == n
    with pytest.raises(UsageError, match=f"vocab_size is {n - 1}, .* set it to {n} or more"):
        load_tokenizer(small_corpus, n - 1, path)


def test_ids_with_holes_count_up_to_the_highest():
    definition = {
        "version": "1.0",
        "added_tokens": [
            {"id": 9, "content": "</s>", "special": True, "single_word": False}
            | dict.fromkeys(("lstrip", "rstrip", "normalized"), False)
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 5, "</s>": 9}, "merges": []},
    }
    tokenizer = Tokenizer(json.dumps(definition))
    assert (tokenizer.vocab_size, tokenizer.separator_id) == (10, 9)
    assert tokenizer.token_lengths().tolist() == [1, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert tokenizer.token_bytes(3) == b""
    with pytest.raises(UsageError, match=r"token id 10 isn't in \[0, 10\)"):
        tokenizer.token_bytes(10)


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]"])
def test_usual_separators_are_found(name: str):
    assert Tokenizer(_byte_level(special=["<pad>", name]).to_str()).separator_id == 1


def test_a_tokenizer_without_a_separator_is_refused_with_the_fix():
    with pytest.raises(UsageError, match=r"no token that can stand between .*add_special_tokens"):
        Tokenizer(_byte_level(special=["<pad>"]).to_str())


def test_a_text_that_spells_the_separator_is_refused():
    made = _byte_level(special=[])
    made.add_tokens([library.AddedToken("</s>", special=False)])
    with pytest.raises(UsageError, match='"special": true'):
        Tokenizer(made.to_str()).encode("one</s>two")


def test_a_document_begins_with_the_separator_or_a_special_token_that_is_given():
    made = _byte_level()
    made.add_special_tokens(["<s>"])
    id_ = made.token_to_id("<s>")
    plain, given = Tokenizer(made.to_str()), Tokenizer(made.to_str(), start_id=id_)
    assert (plain.start_id, plain.start) == (plain.separator_id, plain.separator)
    assert (given.start_id, given.start) == (id_, "<s>")
    assert given.separator_id == plain.separator_id
    for wrong in (made.token_to_id("a"), id_ + 1, "<s>"):
        with pytest.raises(UsageError, match=f"{wrong!r} is to stand before documents"):
            Tokenizer(made.to_str(), start_id=wrong)


def test_a_tokenizer_that_drops_merges_at_random_is_refused():
    definition = json.loads(_byte_level().to_str())
    definition["model"]["dropout"] = 0.1
    with pytest.raises(UsageError, match=r"dropout is 0\.1.* null"):
        Tokenizer(json.dumps(definition))


@pytest.mark.parametrize("content", ["", "{}", "[1]", "text"])
def test_a_file_that_is_no_tokenizer_is_refused(small_corpus, tmp_path: Path, content: str):
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(UsageError, match=r"bad\.json isn't a tokenizer\.json"):
        load_tokenizer(small_corpus, 1000, tmp_path / "bad.json")


def test_a_missing_tokenizer_file_is_refused(small_corpus, tmp_path: Path):
    with pytest.raises(UsageError, match=r"cannot read data\.tokenizer .*none\.json"):
        load_tokenizer(small_corpus, 1000, tmp_path / "none.json")


def test_only_byte_level_tokenizers_have_token_bytes():
    words = library.Tokenizer(models.WordLevel({"</s>": 0, "low": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["</s>"])
    tokenizer = Tokenizer(words.to_str())
    assert tokenizer.encode("low low") == [1, 1]
    assert tokenizer.token_lengths() is None
    with pytest.raises(UsageError, match="byte-level"):
        tokenizer.token_bytes(1)


def test_lengths_are_of_added_words_too():
    made = _byte_level()
    made.add_tokens(["日本"])
    made.normalizer = normalizers.NFC()
    tokenizer = Tokenizer(made.to_str())
    (id_,) = tokenizer.encode("日本")
    assert tokenizer.token_bytes(id_) == "日本".encode()
    assert tokenizer.token_lengths()[id_] == 6
    assert tokenizer.token_lengths().dtype == np.int32
