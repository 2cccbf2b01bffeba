"""Reading prepared TensorFlow Datasets without TensorFlow, and without their noise."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

from headlab.errors import HeadlabError, UsageError

if TYPE_CHECKING:
    import tensorflow_datasets as tfds

_BATCH = 1024


def import_tfds() -> ModuleType:
    """TensorFlow Datasets, which takes a second to import; UsageError if it isn't installed."""
    try:
        return importlib.import_module("tensorflow_datasets")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"this corpus is read through TensorFlow Datasets, and {error.name} isn't installed: "
            "`pip install tensorflow-datasets array-record`."
        ) from error


@contextlib.contextmanager
def quiet_tfds() -> Iterator[None]:
    """Keep the progress bars of TFDS, and what it prints, from the user's terminal."""
    from tensorflow_datasets.core.utils import tqdm_utils

    shown = tqdm_utils._active
    tqdm_utils.display_progress_bar(False)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        tqdm_utils.display_progress_bar(shown)


def check_readable(builder: tfds.core.DatasetBuilder) -> None:
    """Raise UsageError if a prepared dataset can only be read by TensorFlow, which is absent."""
    if not _has_random_access(builder) and importlib.util.find_spec("tensorflow") is None:
        raise UsageError(
            f"{builder.info.full_name} in {builder.data_path} is prepared as "
            f"{builder.info.file_format.value}, which only TensorFlow reads: `pip install "
            "tensorflow`, or prepare it again with file_format='array_record'."
        )


def read_texts(builder: tfds.core.DatasetBuilder, split: str, feature: str) -> Iterator[str]:
    """The texts of `feature` in `split`, in stored order, empty ones left out.

    Raises HeadlabError if the files are damaged or the text isn't UTF-8.
    """
    for index, raw in enumerate(_raw_texts(builder, split, feature)):
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise HeadlabError(
                f"{builder.info.full_name}: {feature!r} of example {index:,} of {split} isn't "
                f"UTF-8 (byte {error.start:,}): prepare the data set again from UTF-8 text."
            ) from error
        if text:
            yield text


def _raw_texts(builder: tfds.core.DatasetBuilder, split: str, feature: str) -> Iterator[bytes]:
    try:
        if not _has_random_access(builder):
            dataset = builder.as_dataset(split=split, shuffle_files=False)
            yield from (example[feature] for example in import_tfds().as_numpy(dataset))
            return
        source = builder.as_data_source(split=split)
        # One at a time, records come some ten times slower.
        for start in range(0, len(source), _BATCH):
            batch = source.__getitems__(range(start, min(start + _BATCH, len(source))))
            yield from (example[feature] for example in batch)
    except Exception as error:  # the readers raise many types, bare RuntimeError among them
        raise HeadlabError(
            f"cannot read the {split} split of {builder.info.full_name} in {builder.data_path} "
            f"({error}): remove that directory and prepare the data set again."
        ) from error


def _has_random_access(builder: tfds.core.DatasetBuilder) -> bool:
    from tensorflow_datasets.core.file_adapters import FileFormat

    return bool(builder.info.available_file_formats() & FileFormat.with_random_access())
