"""What a resolved configuration promises, and what is refused before any work."""

import pytest

from headlab import config as cfg


def test_values_that_follow_from_others_are_filled_in(changed):
    config = cfg.resolve(changed(model__n_heads=8, train__steps=6000))
    assert config.model.n_kv_heads == 8
    assert config.model.d_mlp == 512
    assert config.optimizer.warmup_steps == 300
    assert cfg.resolve(changed(train__steps=19)).optimizer.warmup_steps == 0


@pytest.mark.parametrize(("d_model", "d_mlp"), [(96, 256), (128, 344), (512, 1368)])
def test_a_swiglu_mlp_is_8_thirds_wide_up_to_a_multiple_of_8(changed, d_model, d_mlp):
    config = cfg.resolve(changed(model__d_model=d_model, model__activation="swiglu"))
    assert config.model.d_mlp == d_mlp


def test_the_options_of_the_chosen_head_are_those_of_its_class(changed):
    head = cfg.resolve(changed(head__softcap=30)).head
    assert head.to_dict() == {
        "name": "tied",
        "vocab_multiple": 128,
        "sum_order": "fast",
        "sum_blocks": 8,
        "untie_at": None,
        "bias": False,
        "softcap": 30.0,
        "logits_dtype": "float32",
    }
    assert type(head.softcap) is float


def test_an_option_of_another_head_is_refused_and_its_head_named(changed, refusal):
    message = refusal(changed(head__n_experts=3))
    assert "head.n_experts is not an option of the head 'tied' but of mixture" in message
    assert "--config.head.name=mixture" in message


def test_an_option_that_no_head_has_is_refused_with_the_nearest(changed, refusal):
    assert "did you mean head.softcap?" in refusal(changed(head__softcup=3.0))


def test_an_option_that_a_head_cannot_do_without_is_asked_for(changed, refusal):
    message = refusal(changed(head__name="mixture"))
    assert "head.n_experts is missing" in message
    assert "--config.head.n_experts to an integer" in message


def test_an_unknown_head_is_refused_with_the_nearest_and_all_names(changed, refusal):
    message = refusal(changed(head__name="unteid"))
    assert "head.name=unteid" in message
    assert "did you mean untied?" in message
    assert "mixture, tied, untied" in message


def test_resolving_again_changes_nothing_and_the_result_is_frozen(changed):
    resolved = cfg.resolve(changed(head__softcap=2.0))
    assert cfg.resolve(resolved) == resolved
    with pytest.raises(AttributeError):
        resolved.seed = 3


def test_resolving_leaves_the_given_configuration_as_it_was():
    config = cfg.default_config()
    cfg.resolve(config)
    assert config.model.d_mlp is None
    assert config == cfg.default_config()


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"train__steps": None}, ["train.steps=none", "an integer"]),
        ({"train__steps": True}, ["train.steps=true", "an integer"]),
        ({"head__softcap": "high"}, ["head.softcap='high'", "a finite number or none"]),
        ({"optimizer__peak_rate": float("nan")}, ["optimizer.peak_rate=nan", "a finite number"]),
        ({"optimizer__b2": 1.0}, ["optimizer.b2=1.0", "in [0, 1)"]),
        ({"model__norm": "batch"}, ["model.norm='batch'", "rms or layer"]),
        ({"model__n_heads": 3}, ["model.n_heads=3", "model.d_model=128", "1, 2, 4, 8, 16"]),
        ({"model__n_kv_heads": 3}, ["model.n_kv_heads=3", "model.n_heads=4", "1, 2, 4"]),
        (
            {"model__d_model": 12, "model__position": "rotary"},
            ["odd width of 3", "--config.model.position=learned"],
        ),
        (
            {"model__d_head": 5, "model__position": "rotary"},
            ["model.d_head=5 is odd", "--config.model.position=learned"],
        ),
        ({"model__d_head": 0}, ["model.d_head=0", "at least 1"]),
        ({"model__norm_eps": 0.0}, ["model.norm_eps=0.0", "greater than 0"]),
        (
            {"model__rope_scaling": (8.0, 1.0, 4.0, 8192.0)},
            ["model.rope_scaling=(8.0,1.0,4.0,8192.0)", "--config.model.position=rotary"],
        ),
        (
            {"model__rope_scaling": (8.0, 1.0, 4.0), "model__position": "rotary"},
            ["model.rope_scaling=(8.0,1.0,4.0)", "a tuple (a finite number"],
        ),
        ({"data__seq_len": 129}, ["data.seq_len=129", "model.max_length=128, learned positions"]),
        (
            {"data__seq_len": 129, "model__position": "rotary"},
            ["data.seq_len=129", "the longest sequence", "--config.model.max_length=129"],
        ),
        ({"data__vocab_size": 256}, ["data.vocab_size=256", "at least 257"]),
        ({"mesh__data": 3}, ["train.batch_size=16", "mesh.data=3", "a multiple of 3"]),
        (
            {"mesh__data": 2, "train__micro_batches": 3},
            ["train.batch_size=16", "train.micro_batches=3", "a multiple of 6"],
        ),
        ({"mesh__data": 2, "eval__batch_size": 3}, ["eval.batch_size=3", "a multiple of 2"]),
        (
            {"train__steps": 300, "optimizer__warmup_steps": 300},
            ["optimizer.warmup_steps=300", "train.steps=300", "at most 299"],
        ),
        (
            {"head__name": "untied", "head__untie_at": 0.5},
            ["head.untie_at=0.5", "'untied'", "--config.head.untie_at=none"],
        ),
        (
            {"head__untie_at": 0.001, "train__steps": 10},
            ["head.untie_at=0.001", "step 0", "(0, 10)"],
        ),
        (
            {"head__untie_at": 0.99, "train__steps": 10},
            ["head.untie_at=0.99", "step 10", "(0, 10)"],
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_value_the_range_and_the_fix(
    changed, refusal, values, parts
):
    message = refusal(changed(**values))
    for part in parts:
        assert part in message
    assert "--config." in message


@pytest.mark.parametrize(
    "scaling", [(0.5, 1, 4, 8192), (8, 4, 1, 8192), (8, 0, 4, 8192), (8, 1, 4, 0)]
)
def test_rotary_scaling_has_its_ranges(scaling, changed, refusal):
    scaling = tuple(float(x) for x in scaling)
    message = refusal(changed(model__rope_scaling=scaling, model__position="rotary"))
    assert "0 < low < high" in message and "(8,1,4,8192)" in message


def test_heads_of_a_width_of_their_own_need_not_divide_d_model(changed):
    model = cfg.resolve(changed(model__n_heads=3, model__d_head=10)).model
    assert cfg.head_width(model) == 10
    assert cfg.head_width(cfg.resolve(changed()).model) == 32


def test_a_small_vocabulary_is_the_matter_of_a_given_tokenizer(changed):
    config = changed(data__vocab_size=20, data__tokenizer="mine.json")
    assert cfg.resolve(config).data.vocab_size == 20


def test_the_step_of_untying_is_the_share_of_the_steps(changed):
    assert cfg.untie_step(cfg.resolve(cfg.default_config())) is None
    assert cfg.untie_step(cfg.resolve(changed(head__untie_at=0.67, train__steps=60))) == 40
