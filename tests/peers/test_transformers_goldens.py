"""Folders of Llama, Qwen 2 and GPT-2 give the log-probabilities that `transformers` gave on them."""

import json
from pathlib import Path

import numpy as np
import pytest
from peers import transformers_recipe as recipe

from headlab.scoring import open_model

GOLDENS = json.loads(Path(__file__).with_name("transformers_goldens.json").read_text())


@pytest.mark.parametrize("name", recipe.GOLDEN)
def test_log_probabilities_are_those_of_transformers(name, byte_tokenizer, tmp_path):
    golden = GOLDENS["cases"][name]
    folder = recipe.write(tmp_path / "m", golden["config"], golden["shapes"], byte_tokenizer)
    found = recipe.summary(recipe.log_probs(open_model(folder)))
    # Logits are of size 10; each is a sum over 32 of states that went through two blocks: a hundred roundings of 2⁻²⁴.
    np.testing.assert_allclose(found, golden["log_probs"], rtol=0, atol=1e-4)
