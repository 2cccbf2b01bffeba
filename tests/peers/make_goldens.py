"""Writes goldens.json, what PyTorch gives in float64 on the recipe: `python tests/peers/make_goldens.py`.

Make it anew when the recipe or what training means has changed, and say why in the commit.
"""

import json
import re
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers import comparison, recipe, torch_reference

PATH = Path(__file__).with_name("goldens.json")


def goldens(name: str) -> dict:
    """The numbers of one case of recipe.GOLDEN."""
    config = recipe.config_of(recipe.GOLDEN[name])
    _, state = recipe.start(config)
    trained = torch_reference.train(config, recipe.flatten(state.params))
    return {
        "loss": trained.loss,
        "gradient_norm": trained.gradient_norm,
        "gradients": {p: comparison.summary(p, x) for p, x in trained.gradients.items()},
        "parameters": {p: comparison.summary(p, x) for p, x in trained.parameters.items()},
    }


def main() -> None:
    cases = {name: _rounded(goldens(name)) for name in recipe.GOLDEN}
    content = {"torch": torch.__version__, "seed": recipe.SEED, "cases": cases}
    text = json.dumps(content, indent=1)
    # a list of numbers on one line
    text = re.sub(r"\[[^\[\]]*\]", lambda numbers: " ".join(numbers[0].split()), text)
    PATH.write_text(text + "\n")


def _rounded(value):
    """`value` with 12 significant digits: the rest differs from machine to machine."""
    if isinstance(value, dict):
        return {key: _rounded(x) for key, x in value.items()}
    return [float(f"{x:.12g}") for x in value]


if __name__ == "__main__":
    main()
