"""headlab and `transformers` read each other's folders, and compute the same on them."""

import json

import numpy as np
import pytest
from peers import transformers_recipe as recipe
from safetensors.numpy import load_file

from headlab import config as configs
from headlab import models
from headlab.costs import read_architecture
from headlab.pretrained import OpenModel, load_head, open_model, save_pretrained

pytestmark = pytest.mark.peers
NEAR = 1e-4  # of log-probabilities, nats: some hundred roundings of 2⁻²⁴ of logits of size 10


@pytest.fixture(scope="module")
def theirs():
    from peers import transformers_reference

    return transformers_reference


@pytest.mark.parametrize("name", recipe.CASES)
def test_logits_are_equal_both_ways(name, theirs, byte_tokenizer, tmp_path):
    import transformers

    model = theirs.make(name)
    model.save_pretrained(tmp_path / "theirs")
    byte_tokenizer.save(tmp_path / "theirs" / "tokenizer.json")
    opened = open_model(tmp_path / "theirs")
    found, expected = recipe.log_probs(opened), theirs.log_probs(model)
    np.testing.assert_allclose(found, expected, rtol=0, atol=NEAR)
    assert read_architecture(tmp_path / "theirs").parameters()["total"] == model.num_parameters()
    assert models.count_parameters(opened.model)["total"] == model.num_parameters()

    layout = save_pretrained(tmp_path / "ours", opened.model, opened.config, opened.tokenizer)
    assert layout == model.config.model_type
    for file, tensor in load_file(tmp_path / "ours" / "model.safetensors").items():
        np.testing.assert_array_equal(tensor, recipe.weight(file, tensor.shape))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    np.testing.assert_array_equal(theirs.log_probs(again), expected)


def test_a_decoder_of_headlab_and_its_tokenizer_load_in_transformers(
    theirs, byte_tokenizer, tmp_path
):
    import transformers

    config = configs.load("configs/llama_tiny.py", [("head.name", "untied")])
    opened = OpenModel(models.build(config, byte_tokenizer.vocab_size), byte_tokenizer, config)
    save_pretrained(tmp_path / "m", opened.model, config, byte_tokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    ids = recipe.tokens() % byte_tokenizer.vocab_size
    h = opened.model(ids)
    found = opened.model.head.log_probs(h, embedding=opened.model.embedding)
    import torch

    expected = model(torch.tensor(ids).long()).logits.log_softmax(-1).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=NEAR)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    text = "a bc é\n日本 a a"
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == byte_tokenizer.encode(text)
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == byte_tokenizer.separator_id


SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
HEADS = {
    "Gemma2Config": SHAPE | ATTENTION | {"final_logit_softcapping": 0.5},
    "Gemma3TextConfig": SHAPE | ATTENTION | {"final_logit_softcapping": 0.25},
    "Qwen3Config": SHAPE | ATTENTION | {"tie_word_embeddings": True, "attention_bias": True},
    "MistralConfig": SHAPE | ATTENTION,
    "GPTNeoXConfig": SHAPE | {"num_attention_heads": 4},
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_gives_the_logits_of_its_model(kind, tmp_path):
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, kind)(**HEADS[kind], initializer_range=0.2)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "m")
    ids = torch.arange(12)[None] * 5
    with torch.no_grad():
        h = model.base_model(ids).last_hidden_state.double().numpy()
        expected = model(ids).logits.numpy()
    head = load_head(tmp_path / "m")
    assert head.softcap == HEADS[kind].get("final_logit_softcapping")
    assert head.bias is None and head.tied == config.tie_word_embeddings
    logits = h @ head.weight.astype(np.float64).T
    assert np.abs(logits).max() > 0.5  # so that a cap bends them
    if head.softcap is not None:
        logits = head.softcap * np.tanh(logits / head.softcap)
    # sums of 32 products of size 1
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
    assert read_architecture(tmp_path / "m").parameters()["total"] == model.num_parameters()


@pytest.mark.parametrize("name", recipe.GOLDEN)
def test_the_committed_goldens_are_what_transformers_gives(name):
    from peers import make_transformers_goldens

    committed = json.loads(make_transformers_goldens.PATH.read_text())["cases"][name]
    fresh = make_transformers_goldens.goldens(name)
    assert fresh["shapes"] == committed["shapes"]
    np.testing.assert_allclose(fresh["log_probs"], committed["log_probs"], rtol=0, atol=1e-6)
