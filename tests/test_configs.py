"""The config files of the repository: each is valid, and says its true size."""

import re
from pathlib import Path

import pytest

from headlab import heads
from headlab.config import flatten, load

CONFIGS = Path(__file__).parents[1] / "configs"
FILES = sorted(CONFIGS.glob("*.py"))


def parameters(config):
    """Parameters of the model in `config`, tied, from the sizes of its matrices and gains."""
    model, rows = config.model, config.data.vocab_size
    assert rows % config.head.vocab_multiple == 0
    assert not model.bias and model.norm == "rms"
    head_width = model.d_model // model.n_heads
    attention = 2 * model.d_model * head_width * (model.n_heads + model.n_kv_heads)
    mlp = (3 if model.activation == "swiglu" else 2) * model.d_model * model.d_mlp
    positions = model.max_length if model.position == "learned" else 0
    blocks = model.n_layers * (attention + mlp + 2 * model.d_model)
    return (rows + positions) * model.d_model + blocks + model.d_model


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("head", ["tied", "untied"])
def test_every_config_file_is_valid_with_either_head(path, head):
    assert load(path, [("head.name", head)]).head.name == head


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_config_file_says_its_command_and_its_true_size(path):
    text = path.read_text(encoding="utf-8")
    assert f"headlab train --config=configs/{path.name} " in text
    config = load(path)
    for said, table in re.findall(r"([\d,]+) (tied|untied)[;.]", text):
        untied = config.data.vocab_size * config.model.d_model if table == "untied" else 0
        assert int(said.replace(",", "")) == parameters(config) + untied


def test_micro_is_the_recipe_that_every_comparison_uses():
    config = load(CONFIGS / "micro.py")
    assert parameters(config) == 1_852_544
    assert parameters(config) + config.data.vocab_size * config.model.d_model == 2_901_120
    assert config.optimizer.warmup_steps == 300
    assert (config.train.steps, config.train.batch_size, config.data.seq_len) == (6000, 16, 128)


def test_micro_can_be_cut_short_by_its_steps_alone():
    config = load(CONFIGS / "micro.py", [("head.name", "untied"), ("train.steps", "100")])
    assert config.optimizer.warmup_steps == 5


def test_small_has_about_30_million_parameters():
    assert 30e6 < parameters(load(CONFIGS / "small.py")) < 45e6


@pytest.mark.parametrize("name", heads.names())
def test_every_head_has_a_config_at_micro_size_that_only_differs_in_the_head(name):
    path = CONFIGS / "heads" / f"{name}.py"
    assert f"headlab train --config=configs/heads/{name}.py " in path.read_text(encoding="utf-8")
    config, micro = load(path), load(CONFIGS / "micro.py")
    assert config.head.name == name
    changed = {key for key, value in flatten(config).items() if flatten(micro).get(key) != value}
    assert all(key.startswith("head.") for key in changed)


def test_the_folder_of_heads_holds_nothing_else():
    assert {path.stem for path in (CONFIGS / "heads").glob("*.py")} == set(heads.names())
