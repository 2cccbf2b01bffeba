"""What the tied and the untied head promise beside the contract: one owner, one convention, options with bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.scipy.special import logsumexp

from headlab import heads
from headlab.embeddings import Table
from headlab.errors import UsageError

VOCAB, WIDTH = 11, 6
OPTIONS = dict(bias=True, softcap=3.0, logit_scale=1.3)


def _build(kind, **options):
    sizes = dict(vocab_size=VOCAB, d_model=WIDTH, rngs=nnx.Rngs(0), vocab_multiple=8)
    return heads.build(kind, **(sizes | options))


def _table(vocab_size=VOCAB, d_model=WIDTH, multiple=8, seed=1):
    return Table(vocab_size, d_model, rngs=nnx.Rngs(seed), vocab_multiple=multiple, init_scale=2.0)


class _Model(nnx.Module):
    """The smallest language model: a table, a nonlinearity, a head."""

    def __init__(self, kind):
        self.embedding = _table()
        self.head = _build(kind)

    def loss(self, tokens, targets):
        h = jnp.tanh(self.embedding(tokens))
        return self.head.loss(h, targets, embedding=self.embedding).objective


def test_a_tied_table_has_one_owner_and_the_gradient_of_both_its_uses():
    model = _Model("tied")
    graph, state = nnx.split(model)
    assert len(jax.tree.leaves(state)) == 1
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, VOCAB, (2, 3, 7)).astype(np.int32)
    gradient = jax.jit(jax.grad(lambda s: nnx.merge(graph, s).loss(tokens, targets)))(state)
    (found,) = jax.tree.leaves(gradient)

    with jax.enable_x64(True):
        table = jnp.asarray(np.asarray(model.embedding.weight[...], np.float64))

        def loss(input_table, output_table):
            logits = jnp.tanh(input_table[tokens]) @ output_table[:VOCAB].T
            chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
            return jnp.sum(logsumexp(logits, axis=-1) - chosen)

        both = jax.jit(jax.grad(loss, argnums=(0, 1)))(table, table)
    input_part, output_part = map(np.asarray, both)
    assert min(np.linalg.norm(input_part), np.linalg.norm(output_part)) > 1  # both matter
    # 21 tokens, each with a relative error of some ten roundings.
    close = 10 * 2.0**-23 * np.linalg.norm(found)
    np.testing.assert_allclose(found, input_part + output_part, atol=close)


def test_an_untied_head_gives_the_table_its_input_part_alone():
    model = _Model("untied")
    graph, state = nnx.split(model)
    assert len(jax.tree.leaves(state)) == 2
    tokens = np.array([[1, 2]], np.int32)
    gradient = jax.jit(jax.grad(lambda s: nnx.merge(graph, s).loss(tokens, tokens)))(state)
    table = gradient["embedding"]["weight"][...]
    np.testing.assert_array_equal(np.flatnonzero(np.any(table != 0, axis=1)), [1, 2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, OPTIONS])
def test_tied_and_untied_with_equal_matrices_give_equal_bits(options, dtype):
    """One convention: nothing is scaled by √d or 1/√d on one side only."""
    tied, untied = _build("tied", **options), _build("untied", **options)
    table, other = _table(), _table(seed=2)
    untied.weight[...] = table.weight[...]
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.normal(size=(9, WIDTH)), dtype)
    targets = rng.integers(0, VOCAB, 9).astype(np.int32)

    @nnx.jit
    def results(head, table):
        return (
            head.loss(h, targets, embedding=table, z_loss_weight=0.1, label_smoothing=0.1),
            head.log_probs(h, embedding=table),
            head.top_k(h, 4, embedding=table),
            head.entropy(h, embedding=table),
        )

    for a, b in zip(
        jax.tree.leaves(results(tied, table)), jax.tree.leaves(results(untied, other)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_tied_and_untied_start_from_the_same_distribution_of_rows():
    untied = _build("untied", vocab_size=1000, d_model=64, vocab_multiple=128)
    table = Table(1000, 64, rngs=nnx.Rngs(3), vocab_multiple=128)
    deviations = [np.asarray(w[...])[:1000].std() for w in (untied.weight, table.weight)]
    # The relative error of a deviation from 64,000 normals is 1/√128,000 ≈ 0.3%; four of each.
    np.testing.assert_allclose(deviations, 0.25 / 8, rtol=4 / np.sqrt(2 * 64_000))
    assert not np.any(untied.weight[...][1000:])


def test_padding_does_not_change_the_first_rows():
    plain, padded = _build("untied", vocab_multiple=1), _build("untied", vocab_multiple=8)
    np.testing.assert_array_equal(plain.weight[...], padded.weight[...][:VOCAB])


@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({}, WIDTH + 1),
        (dict(bias=True), WIDTH + 2),
        (dict(softcap=30.0), None),
        (dict(vocab_size=4), 4),
        (dict(vocab_size=4, softcap=30.0), None),
    ],
)
def test_rank_bounds_are_those_of_the_theorem(kind, options, bound):
    assert _build(kind, **options).rank_bound() == bound


@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_rank_bound_is_reached(kind, bias):
    head, table = _build(kind, vocab_size=24, bias=bias), _table(24, WIDTH, 8)
    if bias:
        head.bias[...] = jnp.asarray(np.random.default_rng(1).normal(size=24), jnp.float32)
    h = np.random.default_rng(0).normal(size=(40, WIDTH))
    log_probs = head.log_probs(h, embedding=table, dtype=np.float64)
    singular = np.linalg.svd(log_probs, compute_uv=False)
    rank = int(np.sum(singular > singular[0] * 400 * np.finfo(float).eps))
    assert rank == head.rank_bound()


@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("softcap", 0.0),
        ("softcap", -1.0),
        ("softcap", float("nan")),
        ("softcap", float("inf")),
        ("logit_scale", 0.0),
        ("logit_scale", float("nan")),
        ("logit_scale", float("-inf")),
        ("logits_dtype", "float16"),
        ("logits_dtype", "float64"),
    ],
)
def test_options_out_of_range_are_refused_by_value(kind, option, value):
    with pytest.raises(ValueError, match=f"{option} is {value!r}; it must be"):
        _build(kind, **{option: value})


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_an_impossible_initial_scale_is_refused_by_value(value):
    with pytest.raises(ValueError, match=f"init_scale is {value}; it must be"):
        _build("untied", init_scale=value)
    with pytest.raises(ValueError, match=f"init_scale is {value}; it must be"):
        Table(5, 3, rngs=nnx.Rngs(0), init_scale=value)


def test_a_tied_head_says_what_table_it_needs():
    head, h = _build("tied"), jnp.ones((2, WIDTH))
    targets = jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="embedding="):
        head.nll(h, targets)
    for table in (_table(vocab_size=20), _table(d_model=4), _table(multiple=1)):
        found = table.weight[...].shape
        with pytest.raises(ValueError, match=rf"\({found[0]}, {found[1]}\).*11.*\(16, 6\)"):
            head.nll(h, targets, embedding=table)


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_what_a_head_ties_to_is_declared(kind):
    assert heads.get(kind).ties_to == {"tied": "table", "untied": "nothing"}[kind]


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_bfloat16_logits_stay_near_float32_ones(kind):
    """Every product is rounded once, 2⁻⁸ relative; an nll moves by at most twice the largest change of a logit."""
    table, h = _table(), jnp.asarray(np.random.default_rng(0).normal(size=(9, WIDTH)), jnp.float32)
    targets = jnp.arange(9, dtype=jnp.int32)
    exact, rounded = (_build(kind, logits_dtype=t) for t in ("float32", "bfloat16"))
    if kind == "untied":
        exact.weight[...] = rounded.weight[...] = table.weight[...]
    compiled = nnx.jit(lambda head, table: head.nll(h, targets, embedding=table))
    nll = [compiled(head, table) for head in (exact, rounded)]
    largest = np.abs(np.asarray(h) @ np.asarray(table.weight[...]).T).max()
    assert nll[1].dtype == jnp.float32
    np.testing.assert_allclose(*nll, atol=2 * 2.0**-8 * largest)
    assert np.any(nll[0] != nll[1])


def test_the_cost_of_a_linear_head_is_that_of_its_matrix():
    counts = {
        (kind, bias): _build(kind, bias=bias).cost("training")
        for kind in ("tied", "untied")
        for bias in (False, True)
    }
    own = {key: cost.parameters for key, cost in counts.items()}
    assert own == {
        ("tied", False): 0,
        ("tied", True): VOCAB,
        ("untied", False): VOCAB * WIDTH,
        ("untied", True): VOCAB * (WIDTH + 1),
    }
    assert {cost.flops_per_token for cost in counts.values()} == {6 * VOCAB * WIDTH}


def test_a_registered_head_is_built_by_its_name_and_a_taken_name_is_refused(monkeypatch):
    monkeypatch.setattr(heads, "_REGISTERED", {})
    heads.register("mine", type("Mine", (heads.get("untied"),), {}))
    made = heads.build("mine", vocab_size=5, d_model=4, rngs=nnx.Rngs(0), bias=True)
    assert type(made).__name__ == "Mine" and made.bias.shape == (5,)
    assert "mine" in heads.names() and "softcap" in heads.options("mine")
    for name, cls, said in [
        ("tied", heads.get("untied"), "There is a head 'tied'"),
        ("a-b", heads.get("untied"), "cannot be called 'a-b'"),
        ("other", dict, "not a subclass"),
    ]:
        with pytest.raises(UsageError, match=said):
            heads.register(name, cls)
