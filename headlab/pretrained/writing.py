"""headlab's decoder as a folder in the Hugging Face layout, which `transformers` loads."""

import json
import os
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict
from safetensors.numpy import save_file

from headlab import models
from headlab.data import Tokenizer
from headlab.errors import HeadlabError, UsageError
from headlab.heads.linear import Tied
from headlab.pretrained.described import describe_decoder
from headlab.pretrained.layouts import HEAD, LAYOUTS, Layout, Tensor, layout_of, tensors


def save_pretrained(
    folder: str | os.PathLike[str],
    model: models.Decoder,
    config: ConfigDict,
    tokenizer: Tokenizer,
    *,
    layout: str | None = None,
) -> str:
    """Writes config.json, model.safetensors (float32, without padding rows), tokenizer.json and tokenizer_config.json.

    Args:
      model, config, tokenizer: as `headlab.scoring.open_model` gives them.
      layout: "llama", "qwen2" or "gpt2"; None is the first of them that fits.

    Returns:
      The layout. Where GPT-2 has a bias and the decoder has none, it is written as zeros, which compute the same.

    Raises:
      UsageError: the layout, or with None each of them, has no place for something of the model; the folder is not
        empty; there is no such layout.
      HeadlabError: the folder can't be written.
    """
    if layout is not None and layout not in LAYOUTS:
        raise UsageError(f"layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}")
    fitting, problems = layout_of(config, model.head, layout)
    if fitting is None:
        raise UsageError(f"{'; '.join(problems)}. Nothing was written.")
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not an empty folder; choose a new one")
    params, size = models.split(model)[1], model.head.vocab_size
    tied = isinstance(model.head, Tied)
    arrays = {
        tensor.name if tensor.name == HEAD else fitting.prefix + tensor.name: _array(
            fitting, tensor, params, size
        )
        for tensor in tensors(fitting, config.model, tied=tied)
    }
    described = describe_decoder(
        fitting, config, size, tied=tied, start_id=tokenizer.start_id, end_id=tokenizer.separator_id
    )
    own = {"bos_token": tokenizer.start, "eos_token": tokenizer.separator}
    own |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.max_length}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save(folder / "tokenizer.json")
        (folder / "tokenizer_config.json").write_text(json.dumps(own, indent=2) + "\n")
        # the last: a folder without it is not taken for a model
        (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    except OSError as problem:
        raise HeadlabError(f"cannot write {folder} ({problem.strerror or problem})") from problem
    return fitting.model_type


def _array(layout: Layout, tensor: Tensor, params: dict, size: int) -> np.ndarray:
    """The tensor, of the decoder's arrays side by side; zeros for a bias that the decoder has not."""
    parts = [_part(params, path) for path in tensor.paths]
    whole = np.concatenate(parts, axis=-1)
    whole = whole[:size] if tensor.kind == "rows" else whole
    return np.ascontiguousarray(whole.T if tensor.kind == "kernel" and layout.transposed else whole)


def _part(params: dict, path: tuple) -> np.ndarray:
    owner = params
    for key in path[:-1]:
        owner = owner[key]
    if path[-1] in owner:
        return np.asarray(owner[path[-1]], np.float32)
    return np.zeros(owner["kernel" if "kernel" in owner else "gain"].shape[-1], np.float32)
