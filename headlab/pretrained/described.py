"""A config.json in the Hugging Face layout as headlab's config of the same decoder, and the other way."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from headlab import config as configs
from headlab.costs import Architecture, read_architecture, read_config
from headlab.errors import UsageError
from headlab.pretrained.layouts import LAYOUTS, Layout

# Llama 3's rotary scaling, in the order of model.rope_scaling
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_decoder_config(folder: Path) -> tuple[Layout, ConfigDict]:
    """The layout of a folder, and headlab's config of its decoder: of the model and the head, the rest at its defaults.

    Raises:
      UsageError: there is no config.json, it is damaged, or it describes what headlab's decoder does not have; the
        message names it.
    """
    path, described = folder / "config.json", read_config(folder)
    kind = described.get("model_type")
    if kind not in LAYOUTS:
        raise UsageError(
            f"{path}: model_type is {kind!r}; headlab reads whole decoders of {', '.join(LAYOUTS)}, and of more kinds "
            "the head alone (headlab.scoring.load_head)"
        )
    layout, shape = LAYOUTS[kind], read_architecture(folder)
    keys = {option: key for key, option in layout.keys}
    try:
        longest = described[keys["max_length"]]
        problems = _other_values(layout, described)
        rotary = {} if layout.positions is not None else _rotary(described, problems)
    except KeyError as problem:
        raise UsageError(f"{path}: {problem.args[0]} is missing") from None
    if not isinstance(longest, int) or longest < 1:
        raise UsageError(
            f"{path}: {keys['max_length']} is {longest!r}; it must be an integer of at least 1"
        )
    problems += _window(shape, longest)
    if problems:
        raise UsageError(f"headlab's decoder has no place for {', '.join(problems)} ({path})")
    values = dict(layout.needs) | {
        "data.vocab_size": shape.vocab_size,
        "data.tokenizer": str(folder / "tokenizer.json"),
        "model.d_model": shape.d_model,
        "model.n_layers": shape.n_layers,
        "model.n_heads": shape.n_heads,
        "model.n_kv_heads": shape.n_kv_heads,
        "model.d_head": None if shape.d_head * shape.n_heads == shape.d_model else shape.d_head,
        "model.d_mlp": shape.d_mlp,
        "model.max_length": longest,
        "model.norm_eps": described.get(keys["norm_eps"], layout.default_eps),
        **_biases(shape),
        **rotary,
        "head.name": "tied" if shape.tied else "untied",
    }
    config = configs.default_config()
    values["data.seq_len"] = min(config.data.seq_len, longest)
    try:
        for key, value in values.items():
            section, name = key.split(".")
            config[section][name] = value
        return layout, configs.resolve(config)
    except (UsageError, TypeError) as problem:
        raise UsageError(f"{path}: {problem}") from None


def describe_decoder(
    layout: Layout, config: ConfigDict, vocab_size: int, *, tied: bool, start_id: int, end_id: int
) -> dict[str, Any]:
    """The config.json of a decoder that the layout fits."""
    model = config.model
    described = {
        "architectures": [layout.architecture],
        "model_type": layout.model_type,
        "vocab_size": vocab_size,
        "tie_word_embeddings": tied,
        "bos_token_id": start_id,
        "eos_token_id": end_id,
        "torch_dtype": "float32",
        **{key: model[option] for key, option in layout.keys},
        **dict(layout.constants),
        **dict(layout.written),
    }
    if layout.positions is not None:
        return described
    biases, scaling = configs.biases(model), model.rope_scaling
    described |= {"head_dim": configs.head_width(model), "rope_theta": model.rope_theta}
    if layout.model_type == "llama":
        described |= {"attention_bias": biases.output, "mlp_bias": biases.mlp}
    if scaling is not None:
        values = dict(zip(_LLAMA3, (*scaling[:3], int(scaling[3])), strict=True))
        described["rope_scaling"] = {"rope_type": "llama3", **values}
    return described


def _other_values(layout: Layout, described: Mapping[str, Any]) -> list[str]:
    """What config.json says that the layout's decoder here does not do."""
    equal = {"gelu_pytorch_tanh": "gelu_new", "swish": "silu"}  # two names of one function
    given = {key: described.get(key, needed) for key, needed in layout.constants}
    found = [
        f"{key}={given[key]!r} (but {needed!r})"
        for key, needed in layout.constants
        if equal.get(given[key], given[key]) != needed
    ]
    if "quantization_config" in described:
        found.append("a quantization_config: weights are read as they stand")
    return found


def _window(shape: Architecture, longest: int) -> list[str]:
    """A window over which attention does not see all of the longest sequence."""
    if shape.window is None or shape.n_windowed == 0 or shape.window >= longest:
        return []
    return [f"a sliding_window of {shape.window} in {shape.n_windowed} layers"]


def _rotary(described: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Rotary options of either form: rope_parameters, or rope_theta beside rope_scaling; adds to `problems`."""
    rope = described.get("rope_parameters") or described.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        problems.append(f"rotary options {rope!r}")
        return {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    share = rope.get("partial_rotary_factor", described.get("partial_rotary_factor", 1.0))
    if kind not in ("default", "llama3"):
        problems.append(f"rope_type {kind!r} (but 'default' or 'llama3')")
    if share != 1:
        problems.append(f"partial_rotary_factor={share!r} (but 1)")
    theta = rope.get("rope_theta", described.get("rope_theta", 10000.0))
    scaling = tuple(rope[key] for key in _LLAMA3) if kind == "llama3" else None
    return {"model.rope_theta": theta, "model.rope_scaling": scaling}


def _biases(shape: Architecture) -> dict[str, bool]:
    """`model.bias` where all have one, else the options of their own."""
    if shape.qkv_bias and shape.output_bias and shape.mlp_bias:
        return {"model.bias": True}
    return {
        "model.qkv_bias": shape.qkv_bias,
        "model.output_bias": shape.output_bias,
        "model.mlp_bias": shape.mlp_bias,
    }
