"""The table of options and the defaults: types are kept, and None can be set and unset."""

import pytest

from headlab import config as cfg
from headlab.config.values import as_text, conform


@pytest.mark.parametrize("key", cfg.OPTIONS)
def test_every_default_has_its_declared_type_and_lies_in_its_range(key):
    default = cfg.OPTIONS[key].default
    resolved = cfg.flatten(cfg.resolve(cfg.default_config()))
    assert default is None or resolved[key] == default
    assert type(conform(default, cfg.OPTIONS[key].type)) is type(default)


@pytest.mark.parametrize("key", cfg.OPTIONS)
def test_the_text_of_every_default_overrides_to_the_same_value_and_type(key):
    config = cfg.default_config()
    before = config[key]
    cfg.override(config, key, as_text(before))
    assert config[key] == before
    assert type(config[key]) is type(before)


def test_every_option_is_described_with_its_default_and_what_it_allows():
    rows = {row.key: row for row in cfg.describe("mixture")}
    assert list(rows)[: len(cfg.OPTIONS)] == list(cfg.OPTIONS)
    assert all(row.help and row.allowed and row.default for row in rows.values())
    assert rows["model.d_mlp"].allowed == "an integer at least 1, or none"
    assert rows["head.n_experts"].default == "REQUIRED"
    assert rows["head.cutoffs"].default == "auto"


def test_the_default_configuration_refuses_unknown_names_and_wrong_types():
    config = cfg.default_config()
    with pytest.raises(AttributeError, match="steps"):
        config.train.step = 3
    with pytest.raises(TypeError):
        config.train.steps = 3.5
    with pytest.raises(TypeError):
        config.model.d_mlp = "wide"


def test_an_optional_value_can_be_set_and_unset_and_set_again_in_its_type():
    config = cfg.default_config()
    for d_mlp, clip_norm in [(100, 2), (None, None), (96, 0.5)]:
        config.model.d_mlp = d_mlp
        config.optimizer.clip_norm = clip_norm
        assert config.model.d_mlp == d_mlp
        assert config.optimizer.clip_norm == clip_norm
    config.optimizer.clip_norm = 2
    assert type(config.optimizer.clip_norm) is float
    with pytest.raises(TypeError):
        config.model.d_mlp = 0.5


def test_optional_values_are_set_and_unset_by_text_too():
    config = cfg.default_config()
    for text, value in [("none", None), ("2", 2.0), ("none", None)]:
        cfg.override(config, "optimizer.clip_norm", text)
        assert config.optimizer.clip_norm == value
        assert cfg.resolve(config).optimizer.clip_norm == value
    cfg.override(config, "model.rope_scaling", "(8,1,4,8192)")
    assert config.model.rope_scaling == (8.0, 1.0, 4.0, 8192.0)
    cfg.override(config, "model.rope_scaling", "none")
    cfg.override(config, "model.n_kv_heads", "2")
    assert cfg.resolve(config).model.n_kv_heads == 2
    cfg.override(config, "model.n_kv_heads", "none")
    assert cfg.resolve(config).model.n_kv_heads == config.model.n_heads
