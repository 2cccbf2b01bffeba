"""`tfds:NAME` reads prepared datasets without TensorFlow and carves the splits they lack."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.core import constants

from headlab.data import open_corpus
from headlab.data.splitting import SPLITS, split_of
from headlab.data.tfds_reading import quiet_tfds
from headlab.errors import HeadlabError, UsageError

_TEXTS = {
    split: [
        f"{split} document {number}: Grüße, 世界 🙂.\n" * (1 + number % 3) for number in range(n)
    ]
    for split, n in (("train", 1500), ("validation", 30), ("test", 20))
}


class HeadlabTiny(tfds.core.GeneratorBasedBuilder):
    """Texts, with the splits, the names and the features that a configuration gives."""

    VERSION = tfds.core.Version("1.2.0")
    BUILDER_CONFIGS = [  # noqa: RUF012 (TFDS's own way)
        tfds.core.BuilderConfig(name=name)
        for name in (
            "whole",
            "dev",
            "train_only",
            "no_train",
            "sentence",
            "two",
            "numbers",
            "bytes",
        )
    ]

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        features = {
            "sentence": {"sentence": text, "label": tfds.features.Scalar(np.int32)},
            "two": {"question": text, "answer": text},
            "numbers": {"label": tfds.features.Scalar(np.int32)},
        }.get(self.builder_config.name, {"text": text, "title": text})
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
        )

    def _split_generators(self, dl_manager):
        names = {split: split for split in SPLITS}
        if self.builder_config.name == "dev":
            names = {"train": "train", "dev": "validation"}
        if self.builder_config.name == "train_only":
            names = {"train": "train"}
        if self.builder_config.name == "no_train":
            names = {"test": "test"}
        return {name: self._generate_examples(split) for name, split in names.items()}

    def _generate_examples(self, split) -> Iterator[tuple[int, dict]]:
        for number, text in enumerate([*_TEXTS[split], ""]):
            values = {"text": text, "title": "x", "sentence": text, "label": number}
            values |= {"question": text, "answer": text}
            if self.builder_config.name == "bytes":
                values["text"] = b"bad \xff byte"
            yield number, {name: values[name] for name in self.info.features}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all configurations are prepared."""
    directory = tmp_path_factory.mktemp("tfds")
    for config in HeadlabTiny.BUILDER_CONFIGS:
        with quiet_tfds():
            HeadlabTiny(
                config=config.name, data_dir=directory, file_format="array_record"
            ).download_and_prepare()
    return directory


@pytest.fixture(autouse=True)
def _data_dir(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What $TFDS_DATA_DIR sets when TFDS is imported.
    monkeypatch.setattr(constants, "DATA_DIR", str(data_dir))


def test_documents_are_the_texts_of_the_splits_in_order():
    corpus = open_corpus("tfds:headlab_tiny/whole")
    for split in SPLITS:
        assert list(corpus.documents(split)) == _TEXTS[split]
        assert corpus.size_hint(split) == len(_TEXTS[split]) + 1  # the empty one is counted


@pytest.mark.parametrize(
    ("config", "carved"), [("dev", {"test"}), ("train_only", {"validation", "test"})]
)
def test_splits_that_are_missing_are_carved_out_of_train_by_content(config: str, carved: set[str]):
    corpus = open_corpus(f"tfds:headlab_tiny/{config}")
    expected = {
        split: [text for text in _TEXTS["train"] if split_of(text) == split] for split in carved
    }
    expected["train"] = [text for text in _TEXTS["train"] if split_of(text) not in carved]
    expected.setdefault("validation", _TEXTS["validation"])
    for split in SPLITS:
        assert expected[split]
        assert list(corpus.documents(split)) == expected[split]


def test_the_only_text_feature_is_the_text():
    corpus = open_corpus("tfds:headlab_tiny/sentence")
    assert list(corpus.documents("test")) == _TEXTS["test"]


def test_fingerprints_tell_datasets_apart():
    names = ["whole", "dev", "train_only", "sentence"]
    prints = {open_corpus(f"tfds:headlab_tiny/{name}").fingerprint for name in names}
    assert len(prints) == len(names)
    assert open_corpus("tfds:headlab_tiny/dev:1.2.0").fingerprint in prints


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("headlab_tiny/no_train", "has no train split, only test"),
        ("headlab_tiny/two", r"several text features \(answer, question\)|\(question, answer\)"),
        ("headlab_tiny/numbers", r"no text features \(label\)"),
        ("headlab_tiny/other", "has no such dataset|isn't prepared"),
        ("headlab_tiny/whole:9.9.9", "has no such dataset|isn't prepared"),
        ("no_dataset_of_this_name", "has no such dataset"),
    ],
)
def test_datasets_that_cannot_serve_are_refused_with_the_reason(name: str, message: str):
    with pytest.raises(UsageError, match=message) as error:
        open_corpus(f"tfds:{name}")
    assert "\n" not in str(error.value)


def test_an_unprepared_dataset_is_refused_with_the_command_that_prepares_it(
    tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(constants, "DATA_DIR", str(tmp_path))
    with pytest.raises(UsageError, match=r"isn't prepared in .*`tfds build headlab_tiny/whole "):
        open_corpus("tfds:headlab_tiny/whole")
    assert list(tmp_path.iterdir()) == []


def test_text_that_is_not_utf8_is_an_error_that_names_the_example():
    corpus = open_corpus("tfds:headlab_tiny/bytes")
    with pytest.raises(HeadlabError, match=r"example 0 of train isn't UTF-8 \(byte 4\)"):
        list(corpus.documents("train"))


@pytest.fixture
def copied(data_dir: Path, tmp_path: Path, monkeypatch) -> Path:
    """A copy of the prepared `whole` configuration that a test may spoil."""
    shutil.copytree(data_dir, tmp_path / "copy")
    monkeypatch.setattr(constants, "DATA_DIR", str(tmp_path / "copy"))
    return tmp_path / "copy" / "headlab_tiny" / "whole" / "1.2.0"


def test_a_dataset_prepared_as_tfrecord_says_what_to_install(copied: Path, monkeypatch):
    for file in copied.glob("*array_record*"):
        file.rename(str(file).replace("array_record", "tfrecord"))
    info = copied / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"prepared as tfrecord.* `pip install tensorflow`"):
        open_corpus("tfds:headlab_tiny/whole")


def test_a_damaged_dataset_is_an_error_that_names_its_directory(copied: Path):
    (file,) = copied.glob("*train.array_record*")
    file.write_bytes(file.read_bytes()[: 1 << 10])
    with pytest.raises(HeadlabError, match=f"cannot read the train split of .* in {copied}"):
        list(open_corpus("tfds:headlab_tiny/whole").documents("train"))
