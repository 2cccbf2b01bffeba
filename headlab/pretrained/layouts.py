"""Where each array of headlab's decoder stands in published layouts: one table a layout.

Llama: Touvron et al. 2023; Qwen 2: Yang et al. 2024; GPT-2: Radford et al. 2019. A layout fits a decoder where it
computes the same function; what it has no place for is named.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from headlab import config as configs
from headlab.heads import Head
from headlab.heads.linear import Tied, Untied

HEAD = "lm_head.weight"


class Layout(NamedTuple):
    """Names of tensors, and how config.json writes what headlab's config says."""

    model_type: str
    architecture: str  # the class in transformers
    prefix: str  # of all names but the head's; folders of the model without its head leave it out
    embedding: str
    positions: str | None
    final_norm: str
    block: str  # the beginning of the names in block {}
    parts: tuple[
        tuple[str, tuple[str, ...]], ...
    ]  # a name in the block: whose arrays it has, side by side
    transposed: bool  # a matrix is stored [d_out, d_in]
    always_biased: bool  # where the decoder has no bias, the layout has zeros
    needs: tuple[tuple[str, Any], ...]  # options of the config that must have these values
    buffers: str  # a pattern of tensors that follow from the config
    keys: tuple[tuple[str, str], ...]  # config.json's keys of options of headlab's model
    constants: tuple[tuple[str, Any], ...]  # what config.json must say if it says anything
    default_eps: float  # where it says nothing
    written: tuple[tuple[str, Any], ...] = ()  # what else is written, for training goes by it


class Tensor(NamedTuple):
    """One tensor of a layout: arrays of the decoder, by their paths in its parameters."""

    name: str  # without the prefix, but for the head's
    paths: tuple[tuple[Any, ...], ...]  # side by side along the last axis of the decoder's arrays
    kind: str  # "rows" of the vocabulary, a "kernel" or "plain"


_ROTARY = (("model.position", "rotary"), ("model.norm", "rms"), ("model.activation", "swiglu"))
_LLAMA = Layout(
    model_type="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    embedding="embed_tokens.weight",
    positions=None,
    final_norm="norm",
    block="layers.{}.",
    parts=(
        ("input_layernorm", ("attention_norm",)),
        ("self_attn.q_proj", ("attention.query",)),
        ("self_attn.k_proj", ("attention.key",)),
        ("self_attn.v_proj", ("attention.value",)),
        ("self_attn.o_proj", ("attention.output",)),
        ("post_attention_layernorm", ("mlp_norm",)),
        ("mlp.gate_proj", ("mlp.gate",)),
        ("mlp.up_proj", ("mlp.up",)),
        ("mlp.down_proj", ("mlp.down",)),
    ),
    transposed=True,
    always_biased=False,
    needs=_ROTARY,
    buffers=r"rotary_emb\.inv_freq$",
    keys=(
        ("hidden_size", "d_model"),
        ("intermediate_size", "d_mlp"),
        ("num_hidden_layers", "n_layers"),
        ("num_attention_heads", "n_heads"),
        ("num_key_value_heads", "n_kv_heads"),
        ("max_position_embeddings", "max_length"),
        ("rms_norm_eps", "norm_eps"),
    ),
    constants=(("hidden_act", "silu"),),
    default_eps=1e-6,
)
LAYOUTS: dict[str, Layout] = {
    layout.model_type: layout
    for layout in (
        _LLAMA,
        _LLAMA._replace(model_type="qwen2", architecture="Qwen2ForCausalLM"),
        Layout(
            model_type="gpt2",
            architecture="GPT2LMHeadModel",
            prefix="transformer.",
            embedding="wte.weight",
            positions="wpe.weight",
            final_norm="ln_f",
            block="h.{}.",
            parts=(
                ("ln_1", ("attention_norm",)),
                ("attn.c_attn", ("attention.query", "attention.key", "attention.value")),
                ("attn.c_proj", ("attention.output",)),
                ("ln_2", ("mlp_norm",)),
                ("mlp.c_fc", ("mlp.up",)),
                ("mlp.c_proj", ("mlp.down",)),
            ),
            transposed=False,
            always_biased=True,
            needs=(
                ("model.position", "learned"),
                ("model.norm", "layer"),
                ("model.activation", "gelu"),
            ),
            buffers=r"attn\.(masked_)?bias$",
            keys=(
                ("n_embd", "d_model"),
                ("n_inner", "d_mlp"),
                ("n_layer", "n_layers"),
                ("n_head", "n_heads"),
                ("n_positions", "max_length"),
                ("layer_norm_epsilon", "norm_eps"),
                ("embd_pdrop", "dropout"),
                ("resid_pdrop", "dropout"),
            ),
            constants=(
                ("activation_function", "gelu_new"),
                ("scale_attn_weights", True),
                ("scale_attn_by_inverse_layer_idx", False),
                ("add_cross_attention", False),
            ),
            default_eps=1e-5,
            written=(("attn_pdrop", 0.0),),
        ),
    )
}


def tensors(layout: Layout, model: Any, *, tied: bool) -> Iterator[Tensor]:
    """Every tensor of the layout, for the `model` part of a config."""
    biases = configs.biases(model)
    yield Tensor(layout.embedding, (("embedding", "weight"),), "rows")
    if layout.positions is not None:
        yield Tensor(layout.positions, (("positions",),), "plain")
    for i in range(model.n_layers):
        for name, parts in layout.parts:
            name = layout.block.format(i) + name
            paths = tuple(("blocks", i, *part.split(".")) for part in parts)
            if parts[0].endswith("norm"):
                yield from _norm(layout, name, paths[0])
                continue
            yield Tensor(f"{name}.weight", _in(paths, "kernel"), "kernel")
            if layout.always_biased or _biased(parts[0], biases):
                yield Tensor(f"{name}.bias", _in(paths, "bias"), "plain")
    yield from _norm(layout, layout.final_norm, ("final_norm",))
    if not tied:
        yield Tensor(HEAD, (("head", "weight"),), "rows")


def layout_of(
    config: Any, head: Head, wanted: str | None = None
) -> tuple[Layout | None, list[str]]:
    """The wanted layout, or the first that fits, and else what each has no place for."""
    found = []
    for name, layout in LAYOUTS.items():
        if wanted in (None, name):
            misfits = _misfits(layout, config, head)
            if not misfits:
                return layout, []
            found.append(f"{layout.architecture} has no place for {', '.join(misfits)}")
    return None, found


def _biased(part: str, biases: configs.Biases) -> bool:
    if part.startswith("mlp"):
        return biases.mlp
    return biases.output if part == "attention.output" else biases.qkv


def _norm(layout: Layout, name: str, path: tuple[Any, ...]) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", _in((path,), "gain"), "plain")
    if layout.always_biased:
        yield Tensor(f"{name}.bias", _in((path,), "bias"), "plain")


def _in(paths: tuple[tuple[Any, ...], ...], leaf: str) -> tuple[tuple[Any, ...], ...]:
    return tuple((*path, leaf) for path in paths)


def _misfits(layout: Layout, config: Any, head: Head) -> list[str]:
    """What of a decoder the layout has no place for."""
    values, model = configs.flatten(config), config.model
    wrong = [
        f"{key}={values[key]!r} (but {needed!r})"
        for key, needed in layout.needs
        if values[key] != needed
    ]
    if not isinstance(head, Tied | Untied):
        return [*wrong, f"the head {config.head.name!r} (but tied or untied)"]
    wrong += [key for key, is_wrong in _MORE[layout.model_type](model) if is_wrong]
    spec = head.spec
    return wrong + [
        said
        for said, is_wrong in (
            ("the head's bias", head.bias is not None),
            (f"head.softcap={spec.logit_map.softcap}", spec.logit_map.softcap is not None),
            (f"head.logit_scale={spec.logit_map.scale}", spec.logit_map.scale != 1),
            (f"head.logits_dtype={spec.logits_dtype!r}", spec.logits_dtype != "float32"),
        )
        if is_wrong
    ]


def _more_of_llama(model: Any) -> list[tuple[str, bool]]:
    biases = configs.biases(model)
    return [
        (
            "biases of queries, keys and values without one of the output",
            biases.qkv > biases.output,
        ),
        ("a bias of the attention's output alone", biases.output > biases.qkv),
    ]


def _more_of_qwen2(model: Any) -> list[tuple[str, bool]]:
    biases = configs.biases(model)
    return [
        ("queries, keys and values without biases", not biases.qkv),
        ("a bias of the attention's output", biases.output),
        ("biases in the MLP", biases.mlp),
    ]


def _more_of_gpt2(model: Any) -> list[tuple[str, bool]]:
    width = configs.head_width(model)
    return [
        (f"model.n_kv_heads={model.n_kv_heads} (but n_heads)", model.n_kv_heads != model.n_heads),
        (f"model.d_head={width} (but d_model / n_heads)", width * model.n_heads != model.d_model),
    ]


_MORE: dict[str, Callable[[Any], list[tuple[str, bool]]]] = {
    "llama": _more_of_llama,
    "qwen2": _more_of_qwen2,
    "gpt2": _more_of_gpt2,
}
