"""headlab's Llama-like decoder as a folder in the Hugging Face layout, and back, to the same bits.

The layout holds rotary positions, RMSNorm, SwiGLU and a linear head, tied or not (Touvron et al. 2023); what it has no
place for is refused by name, never left out.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict
from safetensors.numpy import save_file

from headlab import config as configs
from headlab import models
from headlab.costs import read_config
from headlab.data import Tokenizer
from headlab.errors import HeadlabError, UsageError
from headlab.heads import Head
from headlab.heads.linear import Tied, Untied
from headlab.models.layers import Norm
from headlab.pretrained.folder import TensorFolder


class Llama(NamedTuple):
    """A decoder with what it needs to read text."""

    model: models.Decoder
    tokenizer: Tokenizer
    config: ConfigDict  # of the model and the head; the rest at its defaults


class _Tensor(NamedTuple):
    """Where an array is in the decoder's parameters and in the layout."""

    path: tuple[Any, ...]
    name: str
    shape: tuple[int, ...]  # in the layout
    kind: (
        str  # "rows" of the vocabulary, a "kernel", which the layout has transposed, or a "vector"
    )


def save_llama(
    folder: str | Path, model: models.Decoder, config: ConfigDict, tokenizer: Tokenizer
) -> None:
    """Writes config.json, model.safetensors (float32, without padding rows), tokenizer.json and tokenizer_config.json.

    `config` is the one that the model was built from, as `headlab.runs.restore_model` gives it.

    Raises:
      UsageError: the layout has no place for something of the model, or the folder is not empty.
      HeadlabError: the folder can't be written.
    """
    folder, shape = Path(folder), config.model
    for said, wrong in (
        *_wrong_of_head(config.head.name, model.head),
        (f"model.position={shape.position!r}, not 'rotary'", shape.position != "rotary"),
        (f"model.norm={shape.norm!r}, not 'rms'", shape.norm != "rms"),
        (f"model.activation={shape.activation!r}, not 'swiglu'", shape.activation != "swiglu"),
    ):
        if wrong:
            raise UsageError(f"the Llama layout has no place for {said}; nothing was written")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not an empty folder; choose a new one")
    params = models.split(model)[1]
    size, tied = model.head.vocab_size, isinstance(model.head, Tied)
    tensors = {}
    for tensor in _tensors(shape, size, tied):
        array = np.asarray(_at(params, tensor.path), np.float32)
        array = array[:size] if tensor.kind == "rows" else array
        tensors[tensor.name] = np.ascontiguousarray(array.T if tensor.kind == "kernel" else array)
    described = _described(shape, size, tied, tokenizer.separator_id)
    separator = {"bos_token": tokenizer.separator, "eos_token": tokenizer.separator}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save(folder / "tokenizer.json")
        own = {"tokenizer_class": "PreTrainedTokenizerFast", **separator}
        (folder / "tokenizer_config.json").write_text(json.dumps(own, indent=2) + "\n")
        # the last: a folder without it is not taken for a model
        (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    except OSError as problem:
        raise HeadlabError(f"cannot write {folder} ({problem.strerror or problem})") from problem


def load_llama(folder: str | Path) -> Llama:
    """The decoder of a folder that `save_llama` wrote, or of any Llama that headlab's decoder can express.

    Raises:
      UsageError: the config has something that the decoder does not have, a tensor is missing, unknown or of another
        shape, or there is no tokenizer.json that can be used.
      HeadlabError: a file is damaged.
    """
    folder = Path(folder)
    described = read_config(folder)
    if described.get("model_type") != "llama":
        raise UsageError(f"{folder} is not of a Llama: the config's model_type must be 'llama'")
    config = _config(described, folder)
    size, tied = config.data.vocab_size, config.head.name == "tied"
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"cannot read {path} ({problem}); a tokenizer.json is needed") from None
    if tokenizer.vocab_size > size:
        raise UsageError(
            f"{path} has ids up to {tokenizer.vocab_size - 1}; the model has {size} tokens"
        )
    files, listed = TensorFolder(folder), list(_tensors(config.model, size, tied))
    # the rotary frequencies follow from the config, and a tied head is the embedding
    ignored = {n for n in files.names() if n.endswith("rotary_emb.inv_freq")}
    ignored |= {"lm_head.weight"} if tied else set()
    names = {tensor.name for tensor in listed}
    for verb, found in (
        ("lacks", names - files.names()),
        ("has the unknown", files.names() - names - ignored),
    ):
        if found:
            raise UsageError(f"{folder} {verb} {', '.join(sorted(found)[:5])}")
    graph, params, constants = models.split(nnx.eval_shape(lambda: models.build(config, size)))
    for tensor in listed:
        array = files.read(tensor.name)
        if array.shape != tensor.shape:
            raise UsageError(
                f"{tensor.name} in {folder} is {array.shape}; its config.json says {tensor.shape}"
            )
        array = (array.T if tensor.kind == "kernel" else array).astype(np.float32)
        if tensor.kind == "rows":
            rows = _at(params, tensor.path).shape[0]
            array = np.pad(array, ((0, rows - size), (0, 0)))
        _at(params, tensor.path[:-1])[tensor.path[-1]] = jnp.asarray(array)
    return Llama(models.merge(graph, params, constants), tokenizer, config)


def _wrong_of_head(name: str, head: Head) -> list[tuple[str, bool]]:
    """What the layout may have no place for, and whether the head has it."""
    if not isinstance(head, Tied | Untied):
        return [(f"the head {name!r}, not tied or untied", True)]
    return [
        ("the head's bias", head.bias is not None),
        ("head.softcap", head.spec.logit_map.softcap is not None),
        ("head.logit_scale", head.spec.logit_map.scale != 1),
        ("head.logits_dtype", head.spec.logits_dtype != "float32"),
    ]


def _tensors(shape: Any, size: int, tied: bool) -> Iterator[_Tensor]:
    """Every array of the decoder, for the `model` part of a config."""
    d, width = shape.d_model, shape.d_model // shape.n_heads
    kv = shape.n_kv_heads * width
    yield _Tensor(("embedding", "weight"), "model.embed_tokens.weight", (size, d), "rows")
    for i in range(shape.n_layers):
        block, layer = ("blocks", i), f"model.layers.{i}"
        for own, name in (
            ("attention_norm", "input_layernorm"),
            ("mlp_norm", "post_attention_layernorm"),
        ):
            yield _Tensor((*block, own, "gain"), f"{layer}.{name}.weight", (d,), "vector")
        for part, own, name, outer, inner in (
            ("attention", "query", "self_attn.q_proj", d, d),
            ("attention", "key", "self_attn.k_proj", kv, d),
            ("attention", "value", "self_attn.v_proj", kv, d),
            ("attention", "output", "self_attn.o_proj", d, d),
            ("mlp", "gate", "mlp.gate_proj", shape.d_mlp, d),
            ("mlp", "up", "mlp.up_proj", shape.d_mlp, d),
            ("mlp", "down", "mlp.down_proj", d, shape.d_mlp),
        ):
            path = (*block, part, own)
            yield _Tensor((*path, "kernel"), f"{layer}.{name}.weight", (outer, inner), "kernel")
            if shape.bias:
                yield _Tensor((*path, "bias"), f"{layer}.{name}.bias", (outer,), "vector")
    yield _Tensor(("final_norm", "gain"), "model.norm.weight", (d,), "vector")
    if not tied:
        yield _Tensor(("head", "weight"), "lm_head.weight", (size, d), "rows")


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _described(shape: Any, size: int, tied: bool, separator_id: int) -> dict[str, Any]:
    """config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": shape.d_model,
        "intermediate_size": shape.d_mlp,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.d_model // shape.n_heads,
        "max_position_embeddings": shape.max_length,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": Norm.EPSILON,
        "hidden_act": "silu",
        "attention_bias": shape.bias,
        "mlp_bias": shape.bias,
        "tie_word_embeddings": tied,
        "bos_token_id": separator_id,
        "eos_token_id": separator_id,
        "torch_dtype": "float32",
    }


def _config(described: dict[str, Any], folder: Path) -> ConfigDict:
    """headlab's config of the model; UsageError for what its decoder does not have."""
    try:
        heads, d = described["num_attention_heads"], described["hidden_size"]
        rope = described.get("rope_parameters") or described.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        bias = bool(described.get("attention_bias", False))
        for said, wrong in (
            (f"rope_type {kind!r}", kind != "default"),
            ("a hidden_act that is not silu", described.get("hidden_act", "silu") != "silu"),
            (
                f"rms_norm_eps={described.get('rms_norm_eps', 1e-6)}, not {Norm.EPSILON}",
                described.get("rms_norm_eps", 1e-6) != Norm.EPSILON,
            ),
            (
                "a head_dim that is not hidden_size ÷ num_attention_heads",
                (described.get("head_dim") or d // heads) * heads != d,
            ),
            (
                "attention_bias and mlp_bias that differ",
                bias != bool(described.get("mlp_bias", False)),
            ),
        ):
            if wrong:
                raise UsageError(
                    f"headlab's decoder has no place for {said} ({folder}/config.json)"
                )
        config = configs.default_config()
        config.data.vocab_size = described["vocab_size"]
        config.data.tokenizer = str(folder / "tokenizer.json")
        config.model.update(
            d_model=d,
            n_layers=described["num_hidden_layers"],
            n_heads=heads,
            n_kv_heads=described.get("num_key_value_heads") or heads,
            d_mlp=described["intermediate_size"],
            max_length=described["max_position_embeddings"],
            rope_theta=float(rope.get("rope_theta", described.get("rope_theta", 10000.0))),
            position="rotary",
            norm="rms",
            activation="swiglu",
            bias=bias,
        )
        config.data.seq_len = min(config.data.seq_len, config.model.max_length)
        config.head.name = "tied" if described.get("tie_word_embeddings", False) else "untied"
    except KeyError as problem:
        raise UsageError(f"{folder}/config.json: {problem.args[0]} is missing") from None
    return configs.resolve(config)
