"""headlab's training step against numbers that PyTorch gave in float64."""

import json
from pathlib import Path

import pytest
from peers import comparison, recipe

GOLDENS = json.loads(Path(__file__).with_name("goldens.json").read_text())


@pytest.mark.parametrize("name", recipe.GOLDEN)
def test_three_steps_give_the_losses_gradients_and_parameters_of_pytorch(name):
    config, golden = recipe.config_of(recipe.GOLDEN[name]), GOLDENS["cases"][name]
    trained = recipe.train_headlab(config, *recipe.start(config))
    relative = comparison.relative_error(config)
    assert trained.loss == pytest.approx(golden["loss"], rel=relative)
    assert trained.gradient_norm == pytest.approx(golden["gradient_norm"], rel=relative)

    norms = {path: numbers[0] for path, numbers in golden["gradients"].items()}
    bounds = comparison.gradient_bounds(config, norms, golden["gradient_norm"][0])
    check(trained.gradients, golden["gradients"], bounds, "gradient")

    norms = {path: numbers[0] for path, numbers in golden["parameters"].items()}
    bounds = comparison.parameter_bounds(config, bounds, norms)
    check(trained.parameters, golden["parameters"], bounds, "parameter")


def check(arrays, golden, bounds, what):
    assert sorted(arrays) == sorted(golden)
    for path, numbers in golden.items():
        message = (
            f"{what} {path} is not PyTorch's; if training is meant to differ, change "
            "torch_reference.py likewise and run tests/peers/make_goldens.py"
        )
        found = comparison.summary(path, arrays[path])
        assert found == pytest.approx(numbers, rel=0, abs=bounds[path]), message
