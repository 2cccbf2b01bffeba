"""The decoder: its sizes, its formulas against a plain float64 one, causality, and its options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_decoder
from flax import nnx

from headlab import config as configs
from headlab import models
from headlab.config import OPTIONS

V = 300
BASE = {
    "model.d_model": "16",
    "model.n_layers": "2",
    "model.n_heads": "4",
    "model.max_length": "12",
    "data.seq_len": "12",
    "data.vocab_size": str(V),
    "head.vocab_multiple": "64",
}
VARIANTS = {
    "learned, RMSNorm, GELU": {},
    "rotary, LayerNorm, biases": {
        "model.position": "rotary",
        "model.norm": "layer",
        "model.bias": "true",
    },
    "SwiGLU, two key-value heads": {"model.activation": "swiglu", "model.n_kv_heads": "2"},
    "wide heads, Llama 3's positions, biases apart": {
        "model.d_head": "6",
        "model.n_kv_heads": "2",
        "model.position": "rotary",
        "model.rope_theta": "30.0",
        "model.rope_scaling": "(4,1,4,10)",
        "model.norm_eps": "0.1",
        "model.qkv_bias": "true",
        "model.output_bias": "true",
        "model.mlp_bias": "true",
    },
    "untied, one key-value head, rotary": {
        "head.name": "untied",
        "head.bias": "true",
        "model.n_kv_heads": "1",
        "model.position": "rotary",
    },
}


def make_config(**overrides):
    changed = configs.default_config()
    # the head decides which of its options exist
    for key, text in sorted({**BASE, **overrides}.items(), key=lambda kv: kv[0] != "head.name"):
        configs.override(changed, key, text)
    return configs.resolve(changed)


def tokens_of(batch=2, length=12, seed=0):
    return np.random.default_rng(seed).integers(0, V, (batch, length)).astype(np.int32)


@nnx.jit
def _score(model, tokens):
    """(hidden states, log-probabilities)."""
    h = model(tokens)
    return h, model.head.log_probs(h, embedding=model.embedding)


def noisy(model, seed=1):
    """The model with every parameter moved, so that gains and biases matter."""
    graph, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return nnx.merge(graph, jax.tree.unflatten(structure, moved))


@pytest.mark.parametrize("head, total", [("tied", 1_852_544), ("untied", 2_901_120)])
def test_micro_has_exactly_the_parameters_of_its_definition(head, total):
    config = configs.load("configs/micro.py", [("head.name", head)])
    model = models.build(config, config.data.vocab_size)
    counts = models.count_parameters(model)
    assert counts["total"] == total
    assert counts["head"] == (0 if head == "tied" else 8192 * 128)


def test_padding_rows_are_not_counted():
    padded = models.build(make_config(), V)
    exact = models.build(make_config(**{"head.vocab_multiple": "1"}), V)
    assert padded.embedding.weight.shape[0] == 320
    assert models.count_parameters(padded) == models.count_parameters(exact)


@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_states_and_log_probs_equal_a_plain_float64_decoder(variant):
    config = make_config(**VARIANTS[variant])
    model = noisy(models.build(config, V))
    tokens = tokens_of()
    params = nnx.to_pure_dict(nnx.state(model))
    h, got = _score(model, tokens)
    expected = reference_decoder.hidden_states(params, config.model, tokens)
    # Float32 rounding through two blocks of sums over at most 64 terms: some tens of eps at states of size 1.
    tolerance = 200 * np.finfo(np.float32).eps * np.abs(expected).max()
    np.testing.assert_allclose(h, expected, rtol=0, atol=tolerance)
    want = reference_decoder.log_probs(params, config.model, tokens, V)
    # A logit sums 16 products of a state (error above) with a row of norm about √16 · 0.12.
    np.testing.assert_allclose(got, want, rtol=0, atol=10 * tolerance)


def test_biases_are_where_their_options_say():
    for option, parts in (
        ("qkv_bias", {"query", "key", "value"}),
        ("output_bias", {"output"}),
        ("mlp_bias", {"up", "gate", "down"}),
    ):
        config = make_config(**{f"model.{option}": "true", "model.activation": "swiglu"})
        block = models.split(models.build(config, V))[1]["blocks"][0]
        parts_of = block["attention"] | block["mlp"]
        assert {name for name, part in parts_of.items() if "bias" in part} == parts


def test_a_cache_holds_the_key_value_heads_alone():
    config = make_config(**{"model.n_kv_heads": "2", "model.d_head": "6"})
    cache = models.build(config, V).empty_cache(3, 7)
    assert [x.shape for layer in cache for x in layer] == [(3, 7, 2, 6)] * 4


def test_wide_heads_go_on_from_a_cache_as_from_the_whole():
    config = make_config(**VARIANTS["wide heads, Llama 3's positions, biases apart"])
    model, tokens = noisy(models.build(config, V)), tokens_of(length=9)
    cache, places, parts = model.empty_cache(2, 9), np.tile(np.arange(9), (2, 1)), []
    for first, last in ((0, 5), (5, 9)):
        h, cache = model.cached(tokens[:, first:last], cache, places[:, first:last])
        parts.append(h)
    # states of size 1 through two blocks: some tens of roundings
    np.testing.assert_allclose(np.concatenate(parts, axis=1), model(tokens), atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_position_depends_on_its_own_and_earlier_tokens_only(variant):
    model = noisy(models.build(make_config(**VARIANTS[variant]), V))
    tokens = tokens_of()
    changed = tokens.copy()
    changed[:, 7:] = (changed[:, 7:] + 1) % V
    before, after = (_score(model, t)[0] for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert (np.abs(before[:, 7:] - after[:, 7:]).max(-1) > 1e-3).all()


@pytest.mark.parametrize(
    ("path", "head"), [("configs/micro.py", "untied"), ("configs/tiny.py", "tied")]
)
def test_training_starts_at_the_loss_of_a_uniform_guess(path, head):
    config = configs.load(path, [("head.name", head)])
    size = config.data.vocab_size
    model = models.build(config, size)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, size, (4, config.data.seq_len + 1)).astype(np.int32)

    @nnx.jit
    def first(model, tokens):
        h = model(tokens[:, :-1])
        return model.head.loss(h, tokens[:, 1:], embedding=model.embedding)

    loss = first(model, tokens)
    assert abs(loss.nats / loss.weight / np.log(size) - 1) < 0.05


def test_rematerialisation_changes_no_gradient():
    tokens = tokens_of()

    def gradient(remat):
        model = models.build(make_config(**{"model.remat": remat}), V)
        graph, state = nnx.split(model)
        return jax.jit(jax.grad(lambda s: jnp.sum(nnx.merge(graph, s)(tokens) ** 3)))(state)

    plain, again = (jax.tree.leaves(gradient(remat)) for remat in ("false", "true"))
    for a, b in zip(plain, again, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(a).max())


def test_dropout_needs_a_key_keeps_the_mean_and_follows_the_key():
    model = models.build(make_config(**{"model.dropout": "0.5"}), V)
    tokens = tokens_of()
    still = model(tokens)
    np.testing.assert_array_equal(still, model(tokens))
    a, b = (model(tokens, dropout_key=jax.random.key(k)) for k in (0, 1))
    np.testing.assert_array_equal(a, model(tokens, dropout_key=jax.random.key(0)))
    assert np.abs(a - b).max() > 0.1
    assert np.abs(a - still).max() > 0.1
    from headlab.models.layers import dropout

    x = dropout(jnp.ones(100_000), 0.25, jax.random.key(2))
    assert set(np.unique(x)) == {0.0, np.float32(1 / 0.75)}
    # The mean of n draws of 0 or 4/3 has standard deviation √(1/3 / n); five of them.
    assert abs(float(x.mean()) - 1) < 5 * (1 / 3 / 100_000) ** 0.5


def test_rotary_scores_depend_on_the_distance_alone():
    from headlab.models.layers import rotate

    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 8))
    turned_q = rotate(jnp.broadcast_to(q, (1, 10, 1, 8)), 100.0)[0, :, 0]
    turned_k = rotate(jnp.broadcast_to(k, (1, 10, 1, 8)), 100.0)[0, :, 0]
    scores = np.asarray(turned_q @ turned_k.T)
    for distance in range(-9, 10):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
    assert np.ptp(scores[0]) > 0.1


def test_bfloat16_compute_stays_near_float32_and_returns_its_own_dtype():
    tokens = tokens_of()
    wide = models.build(make_config(), V)(tokens)
    narrow = models.build(make_config(**{"train.compute_dtype": "bfloat16"}), V)(tokens)
    assert narrow.dtype == jnp.bfloat16
    # States have size 1; bfloat16 rounds to 2⁻⁹ relative, a few tens of times on the way.
    assert np.abs(np.asarray(narrow, np.float32) - wide).max() < 40 * 2**-9


def test_models_that_differ_in_the_head_alone_start_with_one_body():
    tied, untied = (
        nnx.to_pure_dict(nnx.state(models.build(make_config(**{"head.name": name}), V)))
        for name in ("tied", "untied")
    )
    head = untied.pop("head")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), tied, untied))
    assert head["weight"].shape == untied["embedding"]["weight"].shape
    assert not np.array_equal(head["weight"], untied["embedding"]["weight"])


def test_a_sequence_that_is_too_long_is_refused_with_both_numbers():
    model = models.build(make_config(), V)
    with pytest.raises(ValueError, match=r"13 tokens .*max_length=12"):
        model(tokens_of(length=13))


def test_every_model_option_of_the_config_is_exercised_here_or_in_the_sizes():
    exercised = {key for variant in (BASE, *VARIANTS.values()) for key in variant}
    exercised |= {"model.dropout", "model.remat", "model.d_mlp", "model.rope_theta"}
    assert {key for key in OPTIONS if key.startswith("model.")} <= exercised
