"""Whole decoders in published layouts: back to the same bits, by the layout's names, and refused by what is wrong."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headlab import models
from headlab.errors import UsageError
from headlab.pretrained import load_head, load_pretrained, save_pretrained

LLAMA = {"position": "rotary", "activation": "swiglu", "rope_theta": 500.0}
GPT2 = {"norm": "layer", "n_kv_heads": 4, "norm_eps": 1e-5}


def textbook(tensors, described, tokens):
    """Log-probabilities [length, V] of a Llama by its tensors and config, in float64; rotary by halves."""
    tensors = {k: np.asarray(v, np.float64) for k, v in tensors.items()}
    n, kv = described["num_attention_heads"], described["num_key_value_heads"]
    x = tensors["model.embed_tokens.weight"][tokens]
    length, width = len(tokens), described["head_dim"]

    def norm(x, name):
        return (
            x
            / np.sqrt((x**2).mean(-1, keepdims=True) + described["rms_norm_eps"])
            * tensors[f"{name}.weight"]
        )

    def project(x, name):
        return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0)

    def rotated(x):
        frequency = described["rope_theta"] ** (-np.arange(0, width, 2) / width)
        angle = np.concatenate([np.outer(np.arange(length), frequency)] * 2, axis=-1)[:, None]
        half = np.concatenate([-x[..., width // 2 :], x[..., : width // 2]], axis=-1)
        return x * np.cos(angle) + half * np.sin(angle)

    for i in range(described["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        y = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            project(y, f"{layer}.self_attn.{p}_proj").reshape(length, -1, width) for p in "qkv"
        )
        q, k = rotated(q), np.repeat(rotated(k), n // kv, axis=1)
        scores = np.einsum("thw,shw->hts", q, k) / np.sqrt(width)
        scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hts,shw->thw", weights, np.repeat(v, n // kv, axis=1))
        x = x + project(mixed.reshape(length, -1), f"{layer}.self_attn.o_proj")
        y = norm(x, f"{layer}.post_attention_layernorm")
        gate = project(y, f"{layer}.mlp.gate_proj")
        x = x + project(
            gate / (1 + np.exp(-gate)) * project(y, f"{layer}.mlp.up_proj"),
            f"{layer}.mlp.down_proj",
        )
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    logits = norm(x, "model.norm") @ head.T
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def test_a_saved_decoder_is_a_llama_by_the_textbook(decoder, byte_tokenizer, tmp_path):
    config, model = decoder(**LLAMA, bias=True, d_head=6, norm_eps=1e-3)
    assert save_pretrained(tmp_path / "out", model, config, byte_tokenizer) == "llama"
    tokens = np.random.default_rng(0).integers(0, 259, 12)
    found = jax.jit(lambda m, ids: m.head.log_probs(m(ids), embedding=m.embedding))(
        model, tokens[None]
    )
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_allclose(found[0], textbook(tensors, described, tokens), atol=1e-4)


SAVED = {
    "Llama, untied": ("llama", "untied", LLAMA),
    "Llama, tied, all else": (
        "llama",
        "tied",
        LLAMA
        | {
            "bias": True,
            "d_head": 6,
            "norm_eps": 1e-5,
            "rope_scaling": (8.0, 1.0, 4.0, 8192.0),
        },
    ),
    "Llama, attention alone": (
        "llama",
        "tied",
        LLAMA | {"qkv_bias": True, "output_bias": True},
    ),
    "Qwen 2": ("qwen2", "tied", LLAMA | {"qkv_bias": True}),
    "GPT-2": ("gpt2", "tied", GPT2 | {"bias": True}),
    "GPT-2, untied": ("gpt2", "untied", GPT2 | {"bias": True}),
}


@pytest.mark.parametrize("name", SAVED)
def test_a_decoder_is_saved_and_comes_back_to_the_same_bits(
    name, decoder, byte_tokenizer, tmp_path
):
    layout, head, shape = SAVED[name]
    config, model = decoder(head, **shape)
    assert save_pretrained(tmp_path / "out", model, config, byte_tokenizer) == layout
    loaded = load_pretrained(tmp_path / "out")
    assert loaded.config.model == config.model
    assert loaded.config.head.name == head
    assert loaded.tokenizer.fingerprint == byte_tokenizer.fingerprint
    assert loaded.tokenizer.start_id == byte_tokenizer.separator_id
    assert load_head(tmp_path / "out").tied == (head == "tied")
    graph, params, _ = models.split(model)
    again, others, _ = models.split(loaded.model)
    assert graph == again  # what is not an array
    jax.tree.map(np.testing.assert_array_equal, params, others)


def test_gpt_2_without_biases_has_zeros(decoder, byte_tokenizer, tmp_path):
    config, model = decoder(**GPT2)
    save_pretrained(tmp_path / "out", model, config, byte_tokenizer)
    biases = {
        k: v for k, v in load_file(tmp_path / "out" / "model.safetensors").items() if "bias" in k
    }
    assert len(biases) == 2 * 6 + 1
    assert not any(bias.any() for bias in biases.values())
    loaded = load_pretrained(tmp_path / "out")
    ids = np.arange(12)[None]
    np.testing.assert_array_equal(loaded.model(ids), model(ids))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (LLAMA | {"position": "learned"}, r"model\.position='learned' \(but 'rotary'\)"),
        (LLAMA | {"norm": "layer"}, r"LlamaForCausalLM has no place for model\.norm='layer'"),
        (GPT2 | {"norm": "rms"}, r"GPT2LMHeadModel has no place for model\.norm='rms'"),
        (GPT2 | {"activation": "swiglu"}, r"model\.activation='swiglu'"),
        (GPT2 | {"n_kv_heads": 2}, r"GPT2LMHeadModel has no place for model\.n_kv_heads=2"),
        (GPT2 | {"d_head": 8}, r"GPT2LMHeadModel has no place for model\.d_head=8"),
        (LLAMA | {"output_bias": True}, "a bias of the attention's output alone"),
        (LLAMA | {"qkv_bias": True, "mlp_bias": True}, "Qwen2ForCausalLM .* biases in the MLP"),
        (LLAMA | {"head": "mixture_of_softmaxes"}, "the head 'mixture_of_softmaxes'"),
        (LLAMA | {"head_bias": True}, "the head's bias"),
        (LLAMA | {"head_softcap": 5.0}, r"head\.softcap=5\.0"),
        (LLAMA | {"head_logit_scale": 0.5}, r"head\.logit_scale=0\.5"),
    ],
)
def test_what_no_layout_can_express_is_refused_by_name(
    changed, said, decoder, byte_tokenizer, tmp_path
):
    config, model = decoder(**changed)
    with pytest.raises(UsageError, match=said):
        save_pretrained(tmp_path / "out", model, config, byte_tokenizer)
    assert not (tmp_path / "out").exists()


def test_a_wanted_layout_is_the_only_one(decoder, byte_tokenizer, tmp_path):
    config, model = decoder(**LLAMA)
    with pytest.raises(UsageError, match="^Qwen2ForCausalLM has no place for queries, keys and"):
        save_pretrained(tmp_path / "out", model, config, byte_tokenizer, layout="qwen2")
    with pytest.raises(UsageError, match="layout is 'bert'; it must be one of llama, qwen2, gpt2"):
        save_pretrained(tmp_path / "out", model, config, byte_tokenizer, layout="bert")
    (tmp_path / "mine").write_text("")
    with pytest.raises(UsageError, match="is not an empty folder"):
        save_pretrained(tmp_path, model, config, byte_tokenizer)


# ------------------------------------------------------------------------------------------ reading


def changed_copy(saved, layout, folder, config=None, tensors=None):
    """A copy of a folder, with values of its config.json and tensors of its file (None: none) changed."""
    folder.mkdir(exist_ok=True)
    for file in (saved / layout).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    if config is not None:
        described = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(described))
    if tensors is not None:
        there = load_file(folder / "model.safetensors") | tensors
        there = {name: x for name, x in there.items() if x is not None}
        save_file(there, folder / "model.safetensors")
    return folder


SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("layout", "changed", "said"),
    [
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        ("llama", {"rope_scaling": SCALED}, "original_max_position_embeddings is missing"),
        (
            "llama",
            {"rope_scaling": SCALED | {"original_max_position_embeddings": 0}},
            "the length at least 1",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
        ("llama", {"hidden_act": "gelu"}, r"hidden_act='gelu' \(but 'silu'\)"),
        ("llama", {"head_dim": 5}, r"model\.d_head=5 is odd"),
        ("llama", {"rms_norm_eps": 0}, r"config\.json: model\.norm_eps=0"),
        ("llama", {"rms_norm_eps": "small"}, r"config\.json: .*small"),
        ("llama", {"rope_parameters": [1]}, r"rotary options \[1\]"),
        ("llama", {"rope_theta": "long"}, r"config\.json: .*long"),
        ("llama", {"quantization_config": {}}, "a quantization_config"),
        (
            "llama",
            {"model_type": "mamba"},
            "model_type is 'mamba'; headlab reads whole decoders of",
        ),
        ("llama", {"hidden_size": "wide"}, "hidden_size is 'wide'; it must be an integer"),
        ("llama", {"max_position_embeddings": 0}, "max_position_embeddings is 0; it must be"),
        ("llama", {"num_key_value_heads": 3}, r"n_kv_heads=3 does not divide"),
        ("llama", {"attention_bias": True}, r"lacks model\.layers\.0\.self_attn\.k_proj\.bias"),
        ("llama", {"num_hidden_layers": 3}, r"lacks model\.layers\.2"),
        ("llama", {"num_hidden_layers": 1}, r"has the unknown model\.layers\.1"),
        ("llama", {"intermediate_size": 40}, r"gate_proj\.weight in .*\(40, 16\)"),
        ("llama", {"vocab_size": 200}, "has ids up to 258; the model has 200 tokens"),
        ("llama", {"vocab_size": 300}, r"model\.embed_tokens\.weight in .* is \(259, 16\)"),
        ("llama", {"bos_token_id": 3}, "isn't the id of a special token"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "a sliding_window of 8 in 1 layers",
        ),
        ("gpt2", {"activation_function": "relu"}, r"activation_function='relu' \(but 'gelu_new'\)"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("gpt2", {"n_inner": 40}, r"c_fc\.weight in .* its config\.json says \(16, 40\)"),
        ("gpt2", {"n_positions": 17}, r"wpe\.weight in .* \(17, 16\)"),
        ("gpt2", {"tie_word_embeddings": False}, r"lacks lm_head\.weight"),
    ],
)
def test_a_config_that_headlab_has_not_is_refused(layout, changed, said, saved, tmp_path):
    folder = changed_copy(saved, layout, tmp_path / "m", changed)
    with pytest.raises(UsageError, match=said):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("layout", "tensors", "said"),
    [
        ("llama", {"model.norm.weight": None}, r"lacks model\.norm\.weight"),
        ("llama", {"lm_head.weight": None}, r"lacks lm_head\.weight"),
        ("llama", {"model.more": np.ones(2, np.float32)}, r"has the unknown model\.more"),
        (
            "llama",
            {"model.norm.weight": np.ones(16, np.int32)},
            r"model\.norm\.weight in .*model\.safetensors is of int32",
        ),
        (
            "gpt2",
            {"transformer.h.0.attn.c_attn.bias": np.ones(47, np.float32)},
            r"c_attn\.bias in .* is \(47,\); its config\.json says \(48,\)",
        ),
        (
            "qwen2",
            {"lm_head.weight": np.ones((259, 16), np.float32)},
            r"lm_head\.weight in .* is not model\.embed_tokens\.weight",
        ),
    ],
)
def test_tensors_that_the_config_does_not_say_are_refused(layout, tensors, said, saved, tmp_path):
    folder = changed_copy(saved, layout, tmp_path / "m", tensors=tensors)
    with pytest.raises(UsageError, match=said):
        load_pretrained(folder)


def same_parameters(one, other):
    jax.tree.map(
        np.testing.assert_array_equal, models.split(one.model)[1], models.split(other.model)[1]
    )


def test_a_tied_head_may_be_stored_too_and_buffers_may_stand_there(saved, tmp_path):
    wte = load_file(saved / "gpt2" / "model.safetensors")["transformer.wte.weight"]
    more = {"lm_head.weight": wte, "transformer.h.0.attn.bias": np.ones((1, 1, 16, 16), np.float32)}
    folder = changed_copy(saved, "gpt2", tmp_path / "m", tensors=more)
    same_parameters(load_pretrained(folder), load_pretrained(saved / "gpt2"))


def test_files_may_be_many_and_in_bfloat16(saved, tmp_path):
    folder = changed_copy(saved, "qwen2", tmp_path / "m")
    single = folder / "model.safetensors"
    narrow = {k: x.astype(ml_dtypes.bfloat16) for k, x in load_file(single).items()}
    single.unlink()
    files = {name: f"model-{i % 2 + 1:05}-of-00002.safetensors" for i, name in enumerate(narrow)}
    for file in set(files.values()):
        save_file({k: x for k, x in narrow.items() if files[k] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    found, wide = (load_pretrained(f) for f in (folder, saved / "qwen2"))
    for one, other in zip(
        *(jax.tree.leaves(models.split(m.model)[1]) for m in (found, wide)), strict=True
    ):
        assert one.dtype == np.float32
        np.testing.assert_array_equal(one, np.asarray(other).astype(ml_dtypes.bfloat16))


def test_names_may_lack_the_prefix_of_the_model_with_a_head(saved, tmp_path):
    folder = changed_copy(saved, "gpt2", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    save_file(bare, folder / "model.safetensors")
    same_parameters(load_pretrained(folder), load_pretrained(saved / "gpt2"))


def test_both_forms_of_rotary_options_are_read(saved, tmp_path):
    scaled = SCALED | {"original_max_position_embeddings": 8192}
    new = {"rope_parameters": scaled | {"rope_theta": 7e5}}
    for name, values in (("old", {"rope_scaling": scaled, "rope_theta": 7e5}), ("new", new)):
        model = load_pretrained(changed_copy(saved, "llama", tmp_path / name, values)).config.model
        assert (model.rope_theta, model.rope_scaling) == (7e5, (8.0, 1.0, 4.0, 8192.0))


def test_a_window_that_sees_all_of_the_longest_sequence_is_none(saved, tmp_path):
    wide = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
    assert (
        load_pretrained(changed_copy(saved, "qwen2", tmp_path / "m", wide)).model.max_length == 16
    )


def test_a_folder_without_a_tokenizer_is_refused(saved, tmp_path):
    folder = changed_copy(saved, "llama", tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"cannot read .*tokenizer\.json"):
        load_pretrained(folder)
