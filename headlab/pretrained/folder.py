"""The tensors of a folder in the Hugging Face layout, read one by one from memory-mapped safetensors files.

Files that are pickles (`.bin`, `.pt`) can run code when they are read, and never are.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from headlab.errors import HeadlabError, UsageError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class TensorFolder:
    """Names of all tensors of a folder, and each on demand.

    Raises:
      UsageError: the folder has no safetensors, or an index that names files outside it or not there.
      HeadlabError: a file is damaged.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._file_of = self._single() or self._sharded()

    def names(self) -> set[str]:
        return set(self._file_of)

    def first(self, names: Iterable[str]) -> str | None:
        """The first of the names that the folder has."""
        return next((name for name in names if name in self._file_of), None)

    def read(self, name: str) -> np.ndarray:
        """One tensor in the dtype it is stored in; only its part of the file is read."""
        path = self._file_of[name]
        try:
            with safe_open(path, framework="numpy") as file:
                return file.get_tensor(name)
        except (OSError, SafetensorError) as problem:
            raise HeadlabError(
                f"cannot read {name} from {path} ({problem}): download the file again"
            ) from problem

    def read_float(self, name: str) -> np.ndarray:
        """One tensor in float32; UsageError where it is not of floating-point numbers."""
        array = self.read(name)
        if array.dtype.name not in _FLOATS:
            raise UsageError(
                f"{name} in {self._file_of[name]} is of {array.dtype}; it must be of {', '.join(_FLOATS)}"
            )
        return array.astype(np.float32)

    def check_tied(self, head: str, embedding: str) -> None:
        """UsageError where the head that a tied model stores differs from its embedding."""
        if not np.array_equal(self.read(head), self.read(embedding)):
            raise UsageError(
                f"{head} in {self.folder} is not {embedding}, and its config.json says that the two are tied; set "
                "tie_word_embeddings to false if they are not"
            )

    def _single(self) -> dict[str, Path]:
        path = self.folder / _SINGLE
        return dict.fromkeys(_names(path), path) if path.is_file() else {}

    def _sharded(self) -> dict[str, Path]:
        index = self.folder / _INDEX
        if not index.is_file():
            raise UsageError(self._nothing())
        try:
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            found = {str(name): self.folder / str(file) for name, file in files.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise HeadlabError(f"{index} is damaged ({problem!r}): download it again") from problem
        for path in sorted(set(found.values())):
            if path.parent != self.folder or not path.is_file():
                raise UsageError(f"{index} names {path.name}, which is not in {self.folder}")
        return found

    def _nothing(self) -> str:
        if not self.folder.is_dir():
            return f"{self.folder} is not a folder; give one with a config.json and {_SINGLE}"
        pickles = sorted(p.name for p in self.folder.iterdir() if p.suffix in _PICKLES)
        if pickles:
            return (
                f"{self.folder} has {pickles[0]} and no safetensors: reading a pickle can run any code in it. "
                "Convert it where you trust it, with save_pretrained(..., safe_serialization=True)."
            )
        return f"{self.folder} has neither {_SINGLE} nor {_INDEX}"


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="numpy") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as problem:
        raise HeadlabError(f"{path} is damaged ({problem}): download it again") from problem
