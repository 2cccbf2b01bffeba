"""Those decoders in `transformers` itself."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import numpy as np
import torch
import transformers
from peers import transformers_recipe as recipe


def make(name: str) -> transformers.PreTrainedModel:
    """The model of a case, with the recipe's weights; documents begin and end with the id 258."""
    kind, values = recipe.CASES[name]
    config = getattr(transformers, f"{kind}Config")(**values, bos_token_id=258, eos_token_id=258)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            parameter.copy_(torch.tensor(recipe.weight(path, tuple(parameter.shape))))
    return model


def log_probs(model: torch.nn.Module, dtype=torch.float32) -> np.ndarray:
    """[2, LENGTH, V] of the recipe's tokens."""
    with torch.no_grad():
        logits = model.to(dtype)(torch.tensor(recipe.tokens()).long()).logits
    return logits.log_softmax(-1).numpy()
