"""Any prepared TensorFlow dataset as a corpus: `tfds:NAME`, such as `tfds:wiki40b/en`."""

from __future__ import annotations

from collections.abc import Iterator

from headlab.data.cache import content_key
from headlab.data.splitting import SPLITS, split_of
from headlab.data.tfds_reading import check_readable, import_tfds, read_texts
from headlab.errors import UsageError

_NAMES = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}


class TfdsCorpus:
    """A prepared dataset by its TFDS name: `name`, `name/config` or `name/config:version`.

    It is looked for where TFDS looks, `$TFDS_DATA_DIR` or `~/tensorflow_datasets`; nothing is ever
    downloaded. The text is the feature `text`, or the only text feature there is. A validation or
    test split that the dataset lacks is taken out of train by the hash of each document
    (`splitting.split_of`), and train is what remains.

    The fingerprint covers the full name with its version, and the recorded sizes of the splits and
    their shards.

    Raises UsageError if the dataset is unknown or not prepared, needs TensorFlow that isn't there,
    or has no train split or no text.
    """

    def __init__(self, dataset: str):
        self.name = f"tfds:{dataset}"
        tfds = import_tfds()
        try:
            self._builder = tfds.builder(dataset, try_gcs=False)
        except Exception as error:  # many types, for a name, a config or a version it doesn't know
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise UsageError(
                f"{self.name}: TensorFlow Datasets has no such dataset ({reason[0]}). Give a name "
                "such as tfds:wiki40b/en, or set TFDS_DATA_DIR to the directory where the dataset "
                "is prepared."
            ) from error
        info = self._builder.info
        if not self._builder.is_prepared() or not info.splits:
            raise UsageError(
                f"{self.name} isn't prepared in {self._builder.data_path}. Prepare it once, which "
                f"may download much: `tfds build {dataset} --file_format=array_record`; or set "
                "TFDS_DATA_DIR to where it is."
            )
        check_readable(self._builder)
        self._stored = {
            split: next(name for name in names if name in info.splits)
            for split, names in _NAMES.items()
            if any(name in info.splits for name in names)
        }
        if "train" not in self._stored:
            raise UsageError(
                f"{self.name} has no train split, only {', '.join(info.splits)}; choose another "
                "dataset."
            )
        self._feature = self._text_feature(tfds)
        shards = {
            name: [split.num_bytes, list(split.shard_lengths)]
            for name, split in info.splits.items()
        }
        self.fingerprint = content_key("tfds", info.full_name, self._feature, self._stored, shards)

    def documents(self, split: str) -> Iterator[str]:
        """The documents of `split` in stored order; errors are those of `read_texts`."""
        stored = self._stored.get(split, self._stored["train"])
        texts = read_texts(self._builder, stored, self._feature)
        carved = set(SPLITS) - self._stored.keys()
        if split in carved:
            return (text for text in texts if split_of(text) == split)
        if split == "train" and carved:
            return (text for text in texts if split_of(text) not in carved)
        return texts

    def size_hint(self, split: str) -> int | None:
        """The examples of the stored split; None for a split that is carved out of train."""
        if split not in self._stored:
            return None
        return self._builder.info.splits[self._stored[split]].num_examples

    def _text_feature(self, tfds) -> str:
        features = self._builder.info.features
        texts = [
            name for name, feature in features.items() if isinstance(feature, tfds.features.Text)
        ]
        if "text" in texts:
            return "text"
        if len(texts) == 1:
            return texts[0]
        raise UsageError(
            f"{self.name} has no feature named text, and {'several' if texts else 'no'} text "
            f"features ({', '.join(features)}); choose a dataset of plain text."
        )
