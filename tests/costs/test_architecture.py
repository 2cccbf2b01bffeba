"""Published models in numbers: their totals are those that their makers state, and folders say the same."""

import json

import jax
import pytest

from headlab import config as configs
from headlab import models
from headlab.costs import CHIPS, PRESETS, Setting, chip, model_cost, preset, read_architecture
from headlab.errors import UsageError
from headlab.models.cost import architecture, config_cost

# The number of parameters that each checkpoint holds; Gemma's with the 256,128 rows of its paper's table.
PUBLISHED = {
    "gemma-2-2b": 590_118_912 + 2_024_517_888,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "gpt2": 124_439_808,
    "micro": 1_852_544,
    "micro-untied": 2_901_120,
}


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_the_published_ones(name):
    assert preset(name).parameters()["total"] == PUBLISHED[name]


def test_the_head_of_gemma_2_2b_is_worth_nine_blocks_by_shorthand_and_under_eight_by_its_matrices():
    cost = model_cost(preset("gemma-2-2b"), Setting())
    assert cost.blocks_by_shorthand == pytest.approx(256_128 / (12 * 2304))
    # a block by hand: queries and output 8 heads of 256, keys and values 4, and three matrices of the MLP
    by_hand = 2 * 2304 * 2048 + 2 * 2304 * 1024 + 3 * 2304 * 9216
    assert cost.blocks_by_matrices == pytest.approx(2304 * 256_128 / by_hand)
    assert cost.head_share_of_weights == pytest.approx(590_118_912 / 2_614_636_800)


def test_the_head_of_llama_3_8b_is_seven_percent():
    cost = model_cost(preset("llama-3-8b"), Setting())
    assert preset("llama-3-8b").parameters()["head"] == 525_336_576
    assert cost.head_share_of_weights == pytest.approx(0.07, abs=0.001)


def test_keys_and_values_are_counted_layer_by_layer_with_their_windows():
    gemma = preset("gemma-2-2b")
    a_token = 2 * 4 * 256 * 2  # keys and values of four heads of 256 in two bytes
    assert gemma.kv_bytes(1024, 2) == 26 * 1024 * a_token
    assert gemma.kv_bytes(8192, 2) == 13 * (4096 + 8192) * a_token
    assert preset("llama-2-7b").kv_bytes(4096, 2) == 2 * 32 * 4096 * 4096 * 2


def test_attention_sees_the_context_in_a_block():
    model = preset("gpt2")
    more = model.block_flops(1024) - model.block_flops(24)
    assert more == 1000 * 2 * 2 * 768  # q·k and p·v, a multiply-add two operations


def test_a_decode_step_takes_the_longer_of_operations_and_bytes():
    fast = chip("h100")
    one = model_cost(preset("llama-3-8b"), Setting(batch=1), fast)
    read = one.body_bytes + one.kv_bytes
    assert one.decode["body_seconds"] == pytest.approx(read / fast.bandwidth)
    many = model_cost(preset("llama-3-8b"), Setting(batch=4096, context=1), fast)
    assert many.decode["head_seconds"] == pytest.approx(4096 * many.head_flops / fast.flops)
    assert (
        one.decode["fits"]
        and not model_cost(preset("llama-3-8b"), Setting(), chip("tpu-v5e")).decode["fits"]
    )


def test_logits_and_shards():
    cost = model_cost(preset("gpt2"), Setting(context=100, batch=3, shards=4))
    assert cost.logits_bytes == 3 * 100 * 50_257 * 4
    assert cost.shard["rows"] == 12_565
    assert cost.shard["head_bytes"] == cost.head_bytes / 4


@pytest.mark.parametrize("field", ["context", "batch", "itemsize", "shards"])
def test_a_number_below_one_is_refused(field):
    with pytest.raises(UsageError, match=f"{field} is 0"):
        model_cost(preset("gpt2"), Setting()._replace(**{field: 0}))


@pytest.mark.parametrize(("find", "name"), [(preset, "gema-2-2b"), (chip, "h1000")])
def test_an_unknown_name_is_refused_with_the_nearest(find, name):
    with pytest.raises(UsageError, match="did you mean (gemma-2-2b|h100)"):
        find(name)


def test_chips_are_faster_at_operations_than_at_bytes():
    assert all(c.flops > 50 * c.bandwidth > 1e12 and c.memory > 1e10 for c in CHIPS.values())


# ------------------------------------------------------------------------------- Hugging Face folders

LLAMA = {
    "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14_336,
    "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "vocab_size": 50_257, "n_embd": 768, "n_layer": 12, "n_head": 12,
    "n_positions": 1024,
}  # fmt: skip
# Pythia 70M: 70,426,624 parameters; Qwen 2.5 0.5B: 494,032,768
NEOX = {
    "model_type": "gpt_neox", "vocab_size": 50_304, "hidden_size": 512, "num_hidden_layers": 6,
    "num_attention_heads": 8, "intermediate_size": 2048, "tie_word_embeddings": False,
}  # fmt: skip
QWEN2 = {
    "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864,
    "tie_word_embeddings": True, "sliding_window": 32_768, "use_sliding_window": False,
}  # fmt: skip
GEMMA2 = {
    "model_type": "gemma2", "vocab_size": 256_000, "hidden_size": 2304, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "intermediate_size": 9216, "sliding_window": 4096,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "total"),
    [
        (LLAMA, 8_030_261_248),
        (GPT2, 124_439_808),
        (NEOX, 70_426_624),
        (QWEN2, 494_032_768),
        (GEMMA2, 2_614_341_888),
    ],
)
def test_a_folder_holds_what_its_makers_say(tmp_path, config, total):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_architecture(tmp_path).parameters()["total"] == total


SMALL = {
    "model_type": "llama", "vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 20, "head_dim": 6,
}  # fmt: skip
QKV, OUTPUT, MLP = (4 + 2 + 2) * 6, 8, 20 + 20 + 8


@pytest.mark.parametrize(
    ("changed", "biases"),
    [
        ({"attention_bias": True}, QKV + OUTPUT),
        ({"mlp_bias": True}, MLP),
        ({"model_type": "qwen2"}, QKV),
        ({"model_type": "qwen3", "attention_bias": True}, QKV + OUTPUT + 2 * 6),  # norms of heads
        ({"model_type": "mistral", "attention_bias": True}, 0),
    ],
)
def test_biases_are_counted_where_a_model_has_them(tmp_path, changed, biases):
    totals = []
    for config in (SMALL, SMALL | changed):
        (tmp_path / "config.json").write_text(json.dumps(config))
        totals.append(read_architecture(tmp_path).parameters()["total"])
    assert totals[1] - totals[0] == 3 * biases


def test_windows_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA2))
    assert (read_architecture(tmp_path).window, read_architecture(tmp_path).n_windowed) == (
        4096,
        13,
    )
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    assert read_architecture(tmp_path).n_windowed == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot read"),
        ("{", "is damaged"),
        ('{"model_type": "mamba"}', "model_type is 'mamba'"),
        ('{"model_type": "llama"}', "num_attention_heads is missing"),
        ('{"model_type": "gpt2", "n_embd": 0}', "n_embd is 0; it must be an integer of at least 1"),
    ],
)
def test_a_folder_that_cannot_be_read_is_refused(tmp_path, text, said):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=said):
        read_architecture(tmp_path)


# ------------------------------------------------------------------------------------- our own models

SHAPES = {
    "plain": (),
    "modern": (
        ("model.position", "rotary"), ("model.activation", "swiglu"), ("model.n_kv_heads", "1"),
    ),
    "published": (
        ("model.position", "rotary"), ("model.activation", "swiglu"), ("model.n_kv_heads", "1"),
        ("model.d_head", "10"), ("model.qkv_bias", "true"), ("model.mlp_bias", "true"),
    ),
    "output": (("model.output_bias", "true"),),
    "old": (("model.norm", "layer"), ("model.bias", "true"), ("head.name", "untied")),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_the_architecture_of_a_config_has_the_parameters_of_its_model(shape):
    config = configs.load("configs/tiny.py", SHAPES[shape])
    sizes = []
    jax.eval_shape(
        lambda: sizes.append(models.count_parameters(models.build(config, config.data.vocab_size)))
    )
    assert architecture(config, "x").parameters()["total"] == sizes[0]["total"]


def test_the_cost_of_a_config_is_that_of_its_own_head():
    def cost(head):
        config = configs.load("configs/micro.py", [("head.name", head)])
        return config_cost(config, head, Setting(context=128))

    assert cost("tied").parameters["total"] == 1_852_544
    assert cost("tied")._replace(name="") == model_cost(
        preset("micro"), Setting(context=128)
    )._replace(name="")
    adaptive, full = cost("adaptive"), cost("untied")
    assert adaptive.head_flops < full.head_flops / 3  # its tails are rare
    assert adaptive.decode_head_flops > adaptive.head_flops  # decoding needs all of them
    mixture = cost("mixture_of_softmaxes")
    assert mixture.head_flops > 4 * full.head_flops  # four softmaxes
