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
    "mistral": {"output_bias": False, "qkv_bias": False},
    "gemma": {},
    "gemma2": {"norms_per_block": 4},
    "gemma3_text": {"norms_per_block": 4, "qk_norm": True},
    "qwen2": {"qkv_bias": True, "output_bias": False},
    "qwen3": {"qk_norm": True},
}
# model_type: the names of width, layers, heads, and the MLP's width, which is four times the first where it is left out
_GPT_LIKE = {
    "gpt2": ("n_embd", "n_layer", "n_head", "n_inner"),
    "gpt_neox": ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
}
#: model_type whose config leaves `tie_word_embeddings` out where it is true
_TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3_text", "gpt2")
SUPPORTED = (*_LLAMA_LIKE, *_GPT_LIKE)


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
        return (_gpt if kind in _GPT_LIKE else _llama)(name, kind, config)
    except KeyError as problem:
        raise UsageError(f"{path}: {problem.args[0]} is missing") from None
    except ValueError as problem:
        raise UsageError(f"{path}: {problem}") from None


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
    heads, width = _number(config, "num_attention_heads"), _number(config, "hidden_size")
    layers = _number(config, "num_hidden_layers")
    types = config.get("layer_types")
    window = _number(config, "sliding_window", None)
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
        windowed = layers if window and kind == "mistral" else 0
    bias = bool(config.get("attention_bias", False))
    differs: dict[str, Any] = {"qkv_bias": bias, "output_bias": bias, **_LLAMA_LIKE[kind]}
    return Architecture(
        name=name,
        vocab_size=_number(config, "vocab_size"),
        d_model=width,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=_number(config, "num_key_value_heads", heads),
        d_head=_number(config, "head_dim", width // heads),
        d_mlp=_number(config, "intermediate_size"),
        gated=True,
        tied=_tied(kind, config),
        mlp_bias=kind == "llama" and bool(config.get("mlp_bias", False)),
        window=window,
        n_windowed=windowed if window else 0,
        **differs,
    )


def _gpt(name: str, kind: str, config: Mapping[str, Any]) -> Architecture:
    width_key, layers_key, heads_key, mlp_key = _GPT_LIKE[kind]
    width, heads = _number(config, width_key), _number(config, heads_key)
    attention_bias = kind == "gpt2" or bool(config.get("attention_bias", True))
    return Architecture(
        name=name,
        vocab_size=_number(config, "vocab_size"),
        d_model=width,
        n_layers=_number(config, layers_key),
        n_heads=heads,
        n_kv_heads=heads,
        d_head=width // heads,
        d_mlp=_number(config, mlp_key, 4 * width),
        gated=False,
        tied=_tied(kind, config),
        learned_positions=_number(config, "n_positions") if kind == "gpt2" else 0,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=True,
        norm_bias=True,
    )


def _tied(kind: str, config: Mapping[str, Any]) -> bool:
    return bool(config.get("tie_word_embeddings", kind in _TIED_BY_DEFAULT))


def _number(config: Mapping[str, Any], key: str, default: Any = ...) -> Any:
    """An integer of at least 1, or `default` where it is null or left out."""
    value = config[key] if default is ... else config.get(key)
    if value is None and default is not ...:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} is {value!r}; it must be an integer of at least 1")
    return value
