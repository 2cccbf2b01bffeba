"""A trained model by the path of a run directory or of a folder in the Hugging Face layout."""

import os
from pathlib import Path
from typing import Literal

from headlab import config as configs
from headlab.costs import read_config
from headlab.errors import UsageError
from headlab.pretrained.reading import OpenModel, load_pretrained
from headlab.runs import Restored, RunDirectory, restore_model


def open_model(
    path: str | os.PathLike[str], step: int | Literal["last", "best"] = "last"
) -> OpenModel:
    """The model of a run's checkpoint, or of a folder with a Hugging Face config.json, safetensors and tokenizer.json.

    Parameters are float32. `step` chooses the checkpoint of a run.

    Raises:
      UsageError: there is neither, no such checkpoint, or the folder's model is not one of headlab's decoders (see
        `load_pretrained`).
      HeadlabError: a file is damaged.
    """
    restored = restore(path, step)
    config = restored.config
    if restored.head != config.head.name:  # after late untying
        config = configs.replace(config, {"head.name": restored.head, "head.untie_at": None})
    return OpenModel(restored.model, restored.tokenizer, config)


def restore(
    path: str | os.PathLike[str],
    step: int | Literal["last", "best"] = "last",
    *,
    shards: int = 1,
) -> Restored:
    """`headlab.runs.restore_model` for run directories and Hugging Face folders alike; these have no step."""
    if not is_pretrained(path):
        return restore_model(RunDirectory(path), step, shards=shards)
    if step != "last":
        raise UsageError(
            f"{path} is a folder in the Hugging Face layout and has one model: leave step {step!r} out"
        )
    model, tokenizer, config = load_pretrained(path, shards=shards)
    return Restored(model, config.head.name, tokenizer, config, None)


def is_pretrained(path: str | os.PathLike[str]) -> bool:
    """Whether a folder's config.json says which Hugging Face model it is of; that of a run does not."""
    path = Path(path)
    try:
        return (path / "config.json").is_file() and "model_type" in read_config(path)
    except UsageError:  # damaged: a run's own error says more
        return False
