"""Heads of published models, from folders in the Hugging Face layout; no code of theirs is run."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from headlab.costs import read_architecture, read_config
from headlab.errors import UsageError
from headlab.pretrained.folder import TensorFolder

# In the order in which they are looked for. GPT-2; Llama, Mistral, Gemma, Qwen; Gemma 3 with pictures; GPT-NeoX.
_EMBEDDINGS = (
    "transformer.wte.weight",
    "wte.weight",
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "gpt_neox.embed_in.weight",
)
_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "embed_out.weight")


class PretrainedHead(NamedTuple):
    """logits = map(h · weightᵀ + bias), map(z) = c·tanh(z/c) with a soft cap c, else z."""

    weight: np.ndarray  # [V, d_model], in the dtype it is stored in
    bias: np.ndarray | None  # [V]
    softcap: float | None
    tied: bool  # whether the weight is the input embedding's


def load_head(folder: str | Path) -> PretrainedHead:
    """The output head of a GPT-2, Llama, Mistral, Gemma, Qwen or GPT-NeoX model.

    Only its own tensors are read, from `model.safetensors` or the files of `model.safetensors.index.json`. Where the
    config says that it is tied, it is the embedding; a head that is stored too must be the same.

    Raises:
      UsageError: the config is not known (see `headlab.costs.read_architecture`), the folder has no safetensors or no
        such tensor, its shape is not what the config says, or a tied head that differs from the embedding is stored.
      HeadlabError: a file is damaged.
    """
    architecture = read_architecture(folder)
    tensors = TensorFolder(folder)
    names = _EMBEDDINGS if architecture.tied else _HEADS
    name = tensors.first(names)
    if name is None:
        kind = "input embedding, which the head is tied to" if architecture.tied else "output head"
        raise UsageError(f"{folder} has no {kind}: none of {', '.join(names)}")
    weight = tensors.read(name)
    shape = (architecture.vocab_size, architecture.d_model)
    if weight.shape != shape:
        raise UsageError(f"{name} in {folder} is {weight.shape}; its config.json says {shape}")
    if architecture.tied and (stored := tensors.first(_HEADS)) is not None:
        tensors.check_tied(stored, name)
    bias_name = None if architecture.tied else name.removesuffix("weight") + "bias"
    bias = tensors.read(bias_name) if bias_name in tensors.names() else None
    if bias is not None and bias.shape != shape[:1]:
        raise UsageError(f"{bias_name} in {folder} is {bias.shape}; it must be {shape[:1]}")
    return PretrainedHead(weight, bias, _softcap(Path(folder)), architecture.tied)


def _softcap(folder: Path) -> float | None:
    config = read_config(folder)
    value = config.get("text_config", config).get("final_logit_softcapping")
    if value is None:
        return None
    if not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UsageError(
            f"final_logit_softcapping is {value!r} in {folder / 'config.json'}; it must be positive, or null"
        )
    return float(value)
