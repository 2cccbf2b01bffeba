"""Small decoders, and folders that hold them."""

import jax
import numpy as np
import pytest

from headlab import models
from headlab.config import default_config, resolve
from headlab.pretrained import save_pretrained

BASE = {"d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "max_length": 16}
LLAMA = {"position": "rotary", "activation": "swiglu", "rope_theta": 500.0}
GPT2 = {"norm": "layer", "n_kv_heads": 4, "norm_eps": 1e-5}


@pytest.fixture(scope="session")
def decoder():
    """decoder(head, vocabulary=…, OPTION=…, head_OPTION=…) → (config, model); gains and biases aren't 1 and 0."""

    def make(head="untied", vocabulary=259, **changed):
        config = default_config()
        config.data.vocab_size, config.data.seq_len = vocabulary, 16
        config.data.tokenizer = "given.json"  # so that a vocabulary may be small
        config.head.name = head
        for key, value in (BASE | changed).items():
            if key.startswith("head_"):
                config.head[key.removeprefix("head_")] = value
            else:
                config.model[key] = value
        config = resolve(config)
        graph, params, constants = models.split(models.build(config, vocabulary))
        leaves, tree = jax.tree.flatten(params)
        rng = np.random.default_rng(1)
        leaves = [
            np.asarray(x) + np.float32(0.1) * rng.normal(size=x.shape).astype("f") for x in leaves
        ]
        params = jax.tree.map(jax.numpy.asarray, jax.tree.unflatten(tree, leaves))
        for part in (params["embedding"], params.get("head", {})):
            if "weight" in part:  # padding is zero, as it is in training
                part["weight"] = part["weight"].at[vocabulary:].set(0)
        return config, models.merge(graph, params, constants)

    return make


@pytest.fixture(scope="session")
def saved(decoder, byte_tokenizer, tmp_path_factory):
    """A folder of folders: llama (untied), qwen2 and gpt2 (both tied)."""
    folder = tmp_path_factory.mktemp("saved")
    for layout, head, shape in (
        ("llama", "untied", LLAMA),
        ("qwen2", "tied", LLAMA | {"qkv_bias": True}),
        ("gpt2", "tied", GPT2 | {"bias": True}),
    ):
        config, model = decoder(head, **shape)
        save_pretrained(folder / layout, model, config, byte_tokenizer)
    return folder
