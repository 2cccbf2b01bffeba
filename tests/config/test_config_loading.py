"""Config files and overrides: applied in their types, refused with the reason and the fix."""

import re

import pytest

from headlab import config as cfg
from headlab.errors import UsageError


@pytest.fixture
def config_file(tmp_path):
    def write(body, name="recipe.py"):
        path = tmp_path / name
        path.write_text(body, encoding="utf-8")
        return path

    return write


DEFAULTS = "from headlab.config import default_config as get_config\n"


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("train.stesp", "train.steps"),
        ("optimiser.peak_rate", "optimizer.peak_rate"),
        ("train.peak_rate", "optimizer.peak_rate"),
        ("d_model", "model.d_model"),
        ("train", "train.steps"),
        ("groups.body.wieght_decay", "groups.body.weight_decay"),
        ("head.sofcap", "head.softcap"),
        ("head.vocab_multipel", "head.vocab_multiple"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(key, near):
    config = cfg.default_config()
    with pytest.raises(UsageError, match=f"^{re.escape(key)} .*did you mean {near}[?]"):
        cfg.override(config, key, "1")
    assert cfg.flatten(config) == cfg.flatten(cfg.default_config())


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("train.steps", "10.0", "an integer"),
        ("train.steps", "0", "at least 1"),
        ("seed", "-1", "in [0, 2147483647]"),
        ("model.bias", "1", "true or false"),
        ("model.norm", "batch", "rms or layer"),
        ("optimizer.peak_rate", "fast", "a finite number"),
        ("optimizer.peak_rate", "0.0", "greater than 0"),
        ("train.label_smoothing", "1.0", "in [0, 1)"),
        ("head.untie_at", "1.0", "in (0, 1)"),
        ("head.vocab_multiple", "0", "at least 1"),
        ("head.logits_dtype", "float16", "float32 or bfloat16"),
    ],
)
def test_a_refused_override_names_the_value_what_is_allowed_and_the_fix(key, text, expected):
    with pytest.raises(UsageError) as caught:
        cfg.override(cfg.default_config(), key, text)
    message = str(caught.value)
    assert re.match(f"{key}='?{re.escape(text)}'? is not allowed", message)
    assert expected in message
    assert f"--config.{key}=" in message


def test_a_number_option_stays_the_kind_of_number_that_it_is():
    config = cfg.default_config()
    cfg.override(config, "optimizer.peak_rate", "1")
    cfg.override(config, "train.steps", "7")
    assert type(config.optimizer.peak_rate) is float
    assert type(config.train.steps) is int


def test_a_resolved_configuration_cannot_be_overridden():
    with pytest.raises(TypeError, match="before resolve"):
        cfg.override(cfg.resolve(cfg.default_config()), "train.steps", "3")


def test_overrides_of_a_head_work_in_any_order_because_its_name_comes_first(config_file):
    path = config_file(DEFAULTS)
    pairs = [("head.cutoffs", "10,20"), ("head.name", "mixture"), ("head.n_experts", "3")]
    for order in (pairs, pairs[::-1]):
        head = cfg.load(path, order).head
        assert (head.name, head.cutoffs, head.n_experts) == ("mixture", (10, 20), 3)


def test_the_last_of_two_overrides_of_a_key_wins(config_file):
    assert cfg.load(config_file(DEFAULTS), [("seed", "1"), ("seed", "2")]).seed == 2


def test_a_config_file_may_take_an_argument(config_file):
    path = config_file(
        "from headlab.config import default_config\n"
        "def get_config(text):\n"
        "    config = default_config()\n"
        "    config.seed = int(text)\n"
        "    return config\n"
    )
    assert cfg.load(f"{path}:17").seed == 17


def test_a_reference_between_options_follows_an_override(config_file):
    path = config_file(
        "from headlab.config import default_config\n"
        "def get_config():\n"
        "    config = default_config()\n"
        "    config.eval.batch_size = config.train.get_ref('batch_size') * 2\n"
        "    return config\n"
    )
    assert cfg.load(path, [("train.batch_size", "24")]).eval.batch_size == 48


def test_a_partial_configuration_takes_defaults_and_the_declared_types(config_file):
    path = config_file(
        "from ml_collections import ConfigDict\n"
        "def get_config():\n"
        "    return ConfigDict({'optimizer': {'peak_rate': 1, 'clip_norm': None}}).lock()\n"
    )
    config = cfg.load(path, [("optimizer.peak_rate", "0.5"), ("train.steps", "9")])
    assert config.optimizer.peak_rate == 0.5
    assert config.optimizer.clip_norm is None
    assert config.train.steps == 9
    assert config.model.d_model == 128


def test_a_file_rewritten_at_once_is_read_anew(config_file):
    body = (
        "from headlab.config import default_config\n"
        "def get_config():\n"
        "    config = default_config()\n"
        "    config.seed = {}\n"
        "    return config\n"
    )
    seeds = [cfg.load(config_file(body.format(seed))).seed for seed in (1, 2, 3)]
    assert seeds == [1, 2, 3]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("x =", "line 1: SyntaxError"),
        ("x = 1\n\n1 / 0\n", "line 3: ZeroDivisionError: division by zero"),
        ("x = 3", "no function get_config()"),
        ("def get_config():\n    return 3", "returned int, not a ConfigDict"),
        ("def get_config(text):\n    return text", "get_config() missing 1 required"),
        (
            (
                "from headlab.config import default_config\ndef get_config():\n"
                "    default_config().train.stesp = 3\n"
            ),
            (
                'line 3: AttributeError: \'Key "stesp" does not exist and cannot be added since '
                'the config is locked. Did you mean "steps" instead of "stesp"?'
            ),
        ),
    ],
)
def test_a_config_file_that_fails_is_named_with_the_line_and_the_reason(
    config_file, body, expected
):
    path = config_file(body)
    with pytest.raises(UsageError) as caught:
        cfg.load(path)
    assert str(path) in str(caught.value)
    assert expected in str(caught.value)


def test_a_missing_config_file_is_refused_with_the_nearest_file(config_file, tmp_path):
    path = config_file(DEFAULTS, "micro.py")
    with pytest.raises(UsageError, match=f"did you mean {re.escape(str(path))}[?]"):
        cfg.load(tmp_path / "mirco.py")
    with pytest.raises(UsageError, match=re.escape("such as configs/micro.py")):
        cfg.load(tmp_path)
