"""Heads of published models: the right tensors are read, and pickles never."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from headlab.errors import HeadlabError, UsageError
from headlab.pretrained import load_head

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
