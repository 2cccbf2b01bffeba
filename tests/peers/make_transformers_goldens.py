"""Writes transformers_goldens.json, what transformers gives on the recipe.

    python tests/peers/make_transformers_goldens.py

Make it anew when the recipe has changed, and say why in the commit.
"""

import json
import re
import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers import transformers_recipe as recipe
from peers import transformers_reference

PATH = Path(__file__).with_name("transformers_goldens.json")


def goldens(name: str) -> dict:
    """What a folder of one case holds (config.json, shapes of tensors), and log-probabilities in float64."""
    model = transformers_reference.make(name)
    shapes = {path: list(parameter.shape) for path, parameter in model.named_parameters()}
    described = json.loads(model.config.to_json_string(use_diff=True)) | {"dtype": "float32"}
    described.pop("transformers_version")
    found = recipe.summary(transformers_reference.log_probs(model, torch.float64))
    return {
        "config": described,
        "shapes": shapes,
        "log_probs": [float(f"{x:.9g}") for x in found],
    }


def main() -> None:
    cases = {name: goldens(name) for name in recipe.GOLDEN}
    content = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cases": cases,
    }
    text = json.dumps(content, indent=1)
    # a list of numbers on one line
    text = re.sub(r"\[[^\[\]]*\]", lambda numbers: " ".join(numbers[0].split()), text)
    PATH.write_text(text + "\n")


if __name__ == "__main__":
    main()
