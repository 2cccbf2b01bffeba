"""Published layouts: the right tensors are read, pickles never, and a decoder comes back to the same bits."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headlab import models
from headlab.config import default_config, resolve
from headlab.errors import HeadlabError, UsageError
from headlab.pretrained import load_head, load_llama, save_llama

LLAMA = {
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 6,
}
GPT2 = {"n_embd": 4, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 6}
SHAPES = {
    # model_type: (more of its config, embedding, head or None where it is tied, soft cap)
    "gpt2": (GPT2, "transformer.wte.weight", None, None),
    "llama": (LLAMA, "model.embed_tokens.weight", "lm_head.weight", None),
    "gemma2": (LLAMA | {"final_logit_softcapping": 30.0}, "model.embed_tokens.weight", None, 30.0),
    "gemma3_text": (LLAMA, "model.embed_tokens.weight", None, None),
    "qwen2": (LLAMA, "model.embed_tokens.weight", "lm_head.weight", None),
    "qwen3": (LLAMA | {"tie_word_embeddings": True}, "model.embed_tokens.weight", None, None),
    "gpt_neox": (LLAMA, "gpt_neox.embed_in.weight", "embed_out.weight", None),
}


def write(folder, kind, tensors, *, files=1, **more):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **SHAPES[kind][0], **more}))
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = {name: f"model-{i:05}-of-{files:05}.safetensors" for i, name in enumerate(tensors)}
    for name, file in names.items():
        save_file({name: tensors[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kind", SHAPES)
def test_the_head_is_found_by_the_names_of_its_family(kind, dtype, files, tmp_path):
    _, embedding, head, softcap = SHAPES[kind]
    tensors = {
        name: np.random.default_rng(i).normal(size=(6, 4)).astype(dtype)
        for i, name in enumerate((embedding, head or "other.weight"))
    }
    write(tmp_path, kind, tensors, files=files)
    found = load_head(tmp_path)
    np.testing.assert_array_equal(found.weight, tensors[head or embedding])
    assert found.weight.dtype == dtype
    assert (found.bias, found.softcap, found.tied) == (None, softcap, head is None)


def test_a_bias_is_read(tmp_path):
    bias = np.arange(6, dtype=np.float32)
    write(tmp_path, "llama", {"lm_head.weight": np.ones((6, 4), np.float32), "lm_head.bias": bias})
    np.testing.assert_array_equal(load_head(tmp_path).bias, bias)


def test_pickles_are_refused_by_name_and_not_opened(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **GPT2}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(UsageError, match=r"has pytorch_model\.bin and no safetensors"):
        load_head(tmp_path)


def test_what_is_not_a_model_is_refused_by_what_is_wrong(tmp_path):
    weight = np.ones((6, 4), np.float32)
    write(tmp_path / "a", "llama", {"model.embed_tokens.weight": weight})
    with pytest.raises(UsageError, match=r"no output head: none of lm_head\.weight"):
        load_head(tmp_path / "a")
    write(tmp_path / "b", "llama", {"lm_head.weight": weight[:5]})
    with pytest.raises(UsageError, match=r"\(5, 4\).*says \(6, 4\)"):
        load_head(tmp_path / "b")
    write(tmp_path / "c", "llama", {"lm_head.weight": weight})
    (tmp_path / "c" / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(HeadlabError, match="is damaged"):
        load_head(tmp_path / "c")
    write(tmp_path / "d", "llama", {"lm_head.weight": weight}, files=2)
    index = tmp_path / "d" / "model.safetensors.index.json"
    for file in ("../c/model.safetensors", "nowhere.safetensors"):
        index.write_text(json.dumps({"weight_map": {"lm_head.weight": file}}))
        with pytest.raises(UsageError, match="which is not in"):
            load_head(tmp_path / "d")
    write(tmp_path / "e", "gemma2", {}, final_logit_softcapping=-1)
    save_file({"model.embed_tokens.weight": weight}, tmp_path / "e" / "model.safetensors")
    with pytest.raises(UsageError, match="final_logit_softcapping is -1"):
        load_head(tmp_path / "e")


# ------------------------------------------------------------------------------- the Llama layout


def decoder(head="untied", vocabulary=259, **changed):
    config = default_config()
    config.data.vocab_size, config.data.seq_len = vocabulary, 16
    shape = {"d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "max_length": 16}
    config.model.update(**shape, position="rotary", activation="swiglu", rope_theta=500.0)
    config.model.update(**{k: v for k, v in changed.items() if k in config.model})
    config.head.name = head
    for key in ("bias", "softcap", "logit_scale"):
        if f"head_{key}" in changed:
            config.head[key] = changed[f"head_{key}"]
    config = resolve(config)
    return config, models.build(config, vocabulary)


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


@pytest.mark.parametrize(("head", "bias"), [("untied", False), ("tied", True)])
def test_a_decoder_is_saved_as_a_llama_and_comes_back_to_the_same_bits(
    head, bias, byte_tokenizer, tmp_path
):
    config, model = decoder(head, bias=bias)
    graph, params, constants = models.split(model)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    params = jax.tree.unflatten(tree, leaves)  # gains and biases, too, are not what they begin as
    model = models.merge(graph, params, constants)
    save_llama(tmp_path / "out", model, config, byte_tokenizer)
    tokens = np.random.default_rng(0).integers(0, 259, 12)

    described = json.loads((tmp_path / "out" / "config.json").read_text())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    log_probs = jax.jit(lambda m, ids: m.head.log_probs(m(ids), embedding=m.embedding))
    found = log_probs(model, tokens[None])[0]
    np.testing.assert_allclose(found, textbook(tensors, described, tokens), atol=1e-4)

    loaded = load_llama(tmp_path / "out")
    np.testing.assert_array_equal(log_probs(loaded.model, tokens[None])[0], found)
    assert loaded.tokenizer.fingerprint == byte_tokenizer.fingerprint
    assert loaded.config.model == config.model
    assert load_head(tmp_path / "out").tied == (head == "tied")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"position": "learned"}, r"model\.position='learned'"),
        ({"norm": "layer"}, r"model\.norm='layer'"),
        ({"activation": "gelu"}, r"model\.activation='gelu'"),
        ({"head": "mixture_of_softmaxes"}, "the head 'mixture_of_softmaxes'"),
        ({"head_bias": True}, "the head's bias"),
        ({"head_softcap": 5.0}, r"head\.softcap"),
        ({"head_logit_scale": 0.5}, r"head\.logit_scale"),
    ],
)
def test_what_the_layout_cannot_express_is_refused_by_name(changed, said, byte_tokenizer, tmp_path):
    config, model = decoder(**changed)
    with pytest.raises(UsageError, match=f"no place for {said}"):
        save_llama(tmp_path / "out", model, config, byte_tokenizer)
    assert not (tmp_path / "out").exists()


def test_only_an_empty_folder_is_written(byte_tokenizer, tmp_path):
    (tmp_path / "mine").write_text("")
    config, model = decoder()
    with pytest.raises(UsageError, match="is not an empty folder"):
        save_llama(tmp_path, model, config, byte_tokenizer)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type 'llama3'"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05, not 1e-06"),
        ({"hidden_act": "gelu"}, "hidden_act that is not silu"),
        ({"head_dim": 8}, "a head_dim"),
        ({"attention_bias": True}, "attention_bias and mlp_bias that differ"),
        ({"model_type": "gpt2"}, "not of a Llama"),
        ({"num_hidden_layers": 3}, r"lacks model\.layers\.2"),
        ({"num_hidden_layers": 1}, r"has the unknown model\.layers\.1"),
        (
            {"intermediate_size": 40},
            r"down_proj.*its config\.json says|gate_proj.*its config\.json says",
        ),
        ({"vocab_size": 200}, "has ids up to 258; the model has 200 tokens"),
    ],
)
def test_a_llama_that_the_decoder_is_not_is_refused(changed, said, saved, tmp_path):
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    described = json.loads((saved / "config.json").read_text()) | changed
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(UsageError, match=said):
        load_llama(tmp_path)


@pytest.fixture(scope="module")
def saved(byte_tokenizer, tmp_path_factory):
    config, model = decoder()
    folder = tmp_path_factory.mktemp("llama") / "out"
    save_llama(folder, model, config, byte_tokenizer)
    return folder
