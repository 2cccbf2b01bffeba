"""The architecture that a Hugging Face folder's config.json describes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headlab.costs.architecture import Architecture
from headlab.errors import UsageError

_LLAMA_LIKE: dict[str, dict[str, Any]] = {
    # model_type: what differs from Llama
    "llama": {},
    "mistral": {},
    "gemma": {},
    "gemma2": {"norms_per_block": 4},
    "gemma3_text": {"norms_per_block": 4, "qk_norm": True},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
}
#: model_type whose config leaves `tie_word_embeddings` out where it is true
_TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3_text", "gpt2")
SUPPORTED = (*_LLAMA_LIKE, "gpt2", "gpt_neox")


def read_architecture(folder: str | Path) -> Architecture:
    """The architecture of a folder (or of its config.json) in the Hugging Face layout.

    Raises:
      UsageError: there is no config.json, it is damaged, or its model_type or a value in it is not known here.
    """
    path = _config_path(folder)
    config = read_config(path)
    kind = config.get("model_type")
    if kind == "gemma3" and "text_config" in config:
        config, kind = config["text_config"], "gemma3_text"
    if kind not in SUPPORTED:
        raise UsageError(f"{path}: model_type is {kind!r}; headlab knows {', '.join(SUPPORTED)}")
    name = str(config.get("_name_or_path") or path.parent.name)
    try:
        made = _gpt2 if kind == "gpt2" else _neox if kind == "gpt_neox" else _llama
        return made(name, kind, config)
    except KeyError as problem:
        raise UsageError(f"{path}: {problem.args[0]} is missing") from None


def read_config(folder: str | Path) -> dict[str, Any]:
    """What a folder's config.json (or this file) says; UsageError where there is none or it is damaged."""
    path = _config_path(folder)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise UsageError(
            f"cannot read {path} ({problem.strerror}); give a folder with a config.json"
        ) from None
    except ValueError as problem:
        raise UsageError(f"{path} is damaged: {problem}") from None
    return config if isinstance(config, dict) else {}


def _config_path(folder: str | Path) -> Path:
    path = Path(folder)
    return path / "config.json" if path.is_dir() else path


def _llama(name: str, kind: str, config: Mapping[str, Any]) -> Architecture:
    heads = config["num_attention_heads"]
    layers = config["num_hidden_layers"]
    types = config.get("layer_types")
    window = config.get("sliding_window")
    if kind.startswith("qwen") and not config.get("use_sliding_window", False):
        window = None
    if types:
        windowed = sum(t == "sliding_attention" for t in types)
    elif kind == "gemma2":  # every other layer, from the first
        windowed = (layers + 1) // 2
    elif kind == "gemma3_text":
        pattern = config.get("sliding_window_pattern", 6)
        windowed = sum((i + 1) % pattern != 0 for i in range(layers))
    elif kind.startswith("qwen"):
        windowed = max(layers - config.get("max_window_layers", layers), 0)
    else:
        windowed = layers if window else 0
    attention_bias = bool(config.get("attention_bias", False))
    differs: dict[str, Any] = {"qkv_bias": attention_bias, **_LLAMA_LIKE[kind]}
    return Architecture(
        name=name,
        vocab_size=config["vocab_size"],
        d_model=config["hidden_size"],
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=config.get("num_key_value_heads") or heads,
        d_head=config.get("head_dim") or config["hidden_size"] // heads,
        d_mlp=config["intermediate_size"],
        gated=True,
        tied=bool(config.get("tie_word_embeddings", kind in _TIED_BY_DEFAULT)),
        window=window,
        n_windowed=windowed if window else 0,
        **differs,
    )


def _gpt2(name: str, kind: str, config: Mapping[str, Any]) -> Architecture:
    heads, width = config["n_head"], config["n_embd"]
    return Architecture(
        name=name,
        vocab_size=config["vocab_size"],
        d_model=width,
        n_layers=config["n_layer"],
        n_heads=heads,
        n_kv_heads=heads,
        d_head=width // heads,
        d_mlp=config.get("n_inner") or 4 * width,
        gated=False,
        tied=bool(config.get("tie_word_embeddings", kind in _TIED_BY_DEFAULT)),
        learned_positions=config["n_positions"],
        qkv_bias=True,
        bias=True,
        norm_bias=True,
    )


def _neox(name: str, kind: str, config: Mapping[str, Any]) -> Architecture:
    heads, width = config["num_attention_heads"], config["hidden_size"]
    return Architecture(
        name=name,
        vocab_size=config["vocab_size"],
        d_model=width,
        n_layers=config["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=heads,
        d_head=width // heads,
        d_mlp=config["intermediate_size"],
        gated=False,
        tied=bool(config.get("tie_word_embeddings", kind in _TIED_BY_DEFAULT)),
        qkv_bias=True,
        bias=True,
        norm_bias=True,
    )
