"""Tiny decoders of `transformers` whose weights are the same on every machine, as folders that headlab reads."""

import json
from pathlib import Path

import jax
import numpy as np
from peers import recipe
from safetensors.numpy import save_file

from headlab.pretrained import OpenModel

LENGTH = 24
_SHAPE = {
    "vocab_size": 270,  # more rows than the tokenizer has ids
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_GPT2 = {"vocab_size": 270, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES = {
    # (class in transformers, what its config has)
    "Llama, untied, Llama 3's positions": (
        "Llama",
        _SHAPE | {"rope_parameters": _LLAMA3, "rms_norm_eps": 1e-5, "mlp_bias": True},
    ),
    "Llama, tied, wide heads": (
        "Llama",
        _SHAPE | {"tie_word_embeddings": True, "head_dim": 12, "attention_bias": True},
    ),
    "Qwen 2, untied": ("Qwen2", _SHAPE),
    "Qwen 2, tied": ("Qwen2", _SHAPE | {"tie_word_embeddings": True}),
    "GPT-2, tied": ("GPT2", _GPT2),
    "GPT-2, untied": ("GPT2", _GPT2 | {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-3}),
}
GOLDEN = (
    "Llama, untied, Llama 3's positions",
    "Llama, tied, wide heads",
    "Qwen 2, tied",
    "GPT-2, untied",
)


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor of that name: gains about 1, biases and matrices far enough from 0 that each of them matters."""
    noise = recipe.noise(name, int(np.prod(shape))).reshape(shape)
    if len(shape) == 2:
        return (noise * 4 / shape[-1] ** 0.5).astype(np.float32)
    return (
        noise * 0.5 + name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight"))
    ).astype(np.float32)


def tokens() -> np.ndarray:
    """[2, LENGTH]."""
    noise = recipe.noise("transformers/tokens", 2 * LENGTH)
    return np.floor((noise + 0.5) * _SHAPE["vocab_size"]).astype(np.int32).reshape(2, LENGTH)


def write(folder: Path, described: dict, shapes: dict, tokenizer) -> Path:
    """A folder with these tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(described))
    save_file(
        {name: weight(name, tuple(s)) for name, s in shapes.items()}, folder / "model.safetensors"
    )
    tokenizer.save(folder / "tokenizer.json")
    return folder


def log_probs(opened: OpenModel) -> np.ndarray:
    """[2, LENGTH, V] by headlab."""

    @jax.jit
    def computed(model, ids):
        return model.head.log_probs(model(ids), embedding=model.embedding)

    return np.asarray(computed(opened.model, tokens()))


def summary(found: np.ndarray) -> list[float]:
    """Of log-probabilities: those of the token after each position, and of one token everywhere."""
    own = np.take_along_axis(found[:, :-1], tokens()[:, 1:, None], axis=-1)
    return [float(x) for x in np.concatenate([own.ravel(), found[:, ::4, 7].ravel()])]
