"""The adaptive softmax: its options, the rank of its log-probabilities and its cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adaptive_heads import VOCAB, WIDTH, build, embedding_of, perturbed, states
from flax import nnx

from headlab.embeddings import Table
from headlab.heads.adaptive import Adaptive


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(cutoffs=(4, 11)), "11 is not in 1 … 10"),
        (dict(cutoffs=(0,)), "0 is not in 1 … 10"),
        (dict(cutoffs=(8, 4)), "must ascend, and 4 comes after 8"),
        (dict(cutoffs=(4, 4)), "must ascend, and 4 comes after 4"),
        (dict(cutoffs="some"), "must be 'auto' or integers"),
        (dict(cutoffs="auto", token_counts=None), "which needs token_counts"),
        (dict(div_value=4.0), r"div_value is 4\.0; band 2 would have the width 6 // 4\.0\^2 = 0"),
        (dict(div_value=0.5), r"div_value is 0\.5; it must be at least 1"),
        (dict(token_counts=np.ones(10)), r"token_counts are \(10,\); they must be \(11,\)"),
        (dict(tie_projections=True), "tie_projections is True and tied False"),
        (dict(softcap=0.0), r"softcap is 0\.0; it must be positive"),
        (dict(logit_scale=0.0), r"logit_scale is 0\.0; it must be finite and not 0"),
        (dict(logits_dtype="int8"), "logits_dtype is 'int8'"),
    ],
)
def test_impossible_options_are_refused_with_the_reason(options, reason):
    with pytest.raises(ValueError, match=reason):
        build(**options)


def test_a_tied_head_needs_the_embedding_of_its_own_bands():
    head = build(tied=True)
    for other, reason in (
        (None, "not NoneType"),
        (Table(VOCAB, WIDTH, rngs=nnx.Rngs(0)), "not Table"),
        (embedding_of(head, cutoffs=(4,)), r"cutoffs \(4,\) .* the head has \(4, 8\)"),
        (embedding_of(head, div_value=1.0), r"same cutoffs, div_value and vocab_multiple"),
    ):
        with pytest.raises(ValueError, match=reason):
            head.nll(states(2), jnp.zeros(2, jnp.int32), embedding=other)


def test_smoothing_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"label_smoothing=0\.1: .*every token at every position"):
        build().loss(states(2), jnp.zeros(2, jnp.int32), label_smoothing=0.1)


def test_what_the_model_builds_fits_the_head():
    vocab = 5000
    counts = 1e6 / np.arange(1, vocab + 1)
    given = dict(vocab_size=vocab, d_model=32, token_counts=counts)
    resolved = Adaptive.resolve_options(dict(tied=True), **given)
    assert resolved["tied"] and resolved["cutoffs"] and isinstance(resolved["cutoffs"], tuple)
    assert Adaptive.resolve_options(dict(cutoffs=(7, 9)), **given) == {"cutoffs": (7, 9)}
    for cutoffs in ("auto", resolved["cutoffs"]):
        options = dict(rngs=nnx.Rngs(0), tied=True, cutoffs=cutoffs, **given)
        head, embedding = Adaptive(**options), Adaptive.input_embedding(**options)
        assert head.ties_to == "adaptive" and head.cutoffs == embedding.cutoffs
        nll = nnx.jit(lambda m, e: m.nll(states(2, 32), jnp.arange(2), embedding=e))
        assert np.isfinite(nll(head, embedding)).all()
    untied = dict(rngs=nnx.Rngs(0), cutoffs=(7,), **given)
    assert Adaptive(**untied).ties_to == "nothing"
    assert isinstance(Adaptive.input_embedding(**untied), Table)


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        (dict(cutoffs=(6, 12)), 5 + 1 + 2),
        (dict(cutoffs=(6, 12), head_bias=True), 5 + 1 + 2 + 1),
        (dict(cutoffs=(6, 23)), 5 + 1 + 1),  # the last tail is one token and adds nothing
        (dict(cutoffs=(6, 12), cluster_offset=False), 5 + 1 + 2),
        (dict(cutoffs=(2,), div_value=5.0), 2 + (1 + 1)),  # by columns: two, and a tail of width 1
        (dict(cutoffs=()), 5 + 1),
        (dict(cutoffs=(6, 12), tied=True), 5 + 1 + 2),
        (dict(cutoffs=(6, 12), tied=True, tie_projections=True), 5 + 1 + 2),
    ],
)
def test_the_rank_of_log_probabilities_is_its_bound(options, bound):
    """Reached by random parameters, in float64: it could not be lower."""
    counts = np.arange(24, 0, -1)
    options = dict(div_value=2.0) | options
    head = perturbed(lambda: build(24, 5, token_counts=counts, **options))
    chosen = dict(div_value=options["div_value"], token_counts=counts)
    embedding = perturbed(lambda: embedding_of(head, **chosen)) if head.tied else None
    h = np.random.default_rng(0).normal(size=(40, 5))
    singular = np.linalg.svd(
        head.log_probs(h, embedding=embedding, dtype=np.float64), compute_uv=False
    )
    # Rounding alone leaves singular values up to √(40·24)·largest·2⁻⁵³·(some ten roundings).
    rank = int(np.sum(singular > singular[0] * 40 * 10 * np.finfo(float).eps))
    assert head.rank_bound() == bound == rank


def test_a_soft_cap_promises_no_rank():
    assert build(softcap=3.0).rank_bound() is None


@pytest.mark.optimised
@pytest.mark.parametrize("mode", ["training", "scoring", "decoding"])
def test_the_cost_is_what_the_compiler_counts(mode):
    """A dense program of the same products on as many tokens as the counts say, within 2%: no loops, nothing else."""
    vocab, width, cutoffs, tokens = 3000, 96, (400, 1000), 1000
    counts = np.repeat([6, 2, 1], [400, 600, 2000])  # of 5600 tokens 2400, 1200 and 2000
    head = build(vocab, width, cutoffs=cutoffs, token_counts=counts, vocab_multiple=1)
    shares = (1, 1, 1) if mode == "decoding" else (1, 1200 / 5600, 2000 / 5600)
    clusters = [(tokens, width, 402)]
    for share, own, size in zip(shares[1:], (48, 24), (600, 2000), strict=True):
        clusters.append((round(tokens * share), width, own))
        clusters.append((round(tokens * share), own, size))

    def products(factors):
        return sum(jnp.sum(jnp.tanh(a @ b)) for a, b in factors)

    factors = [
        tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((m, k), (k, n)))
        for m, k, n in clusters
    ]
    function = jax.grad(products) if mode == "training" else products
    flops = jax.jit(function).lower(factors).compile().cost_analysis()["flops"]
    cost = head.cost(mode, counts)
    # The sums and the tanh are counted too, one or a few an entry of each product.
    assert cost.flops_per_token * tokens == pytest.approx(flops, rel=0.02)
    parameters = 96 * 402 + 96 * 48 + 48 * 600 + 96 * 24 + 24 * 2000
    assert cost.parameters == parameters and cost.bytes_read == 4 * parameters


def test_without_counts_tokens_cost_as_if_equally_frequent():
    head = build(vocab=3000, width=96, cutoffs=(400, 1000), token_counts=None)
    assert head.cost("training") == head.cost("training", np.ones(3000))
    rare = np.repeat([1, 0, 0], [400, 600, 2000])
    assert head.cost("training", rare).flops_per_token == 6 * 96 * 402
    with pytest.raises(ValueError, match="mode is 'guessing'"):
        head.cost("guessing")
