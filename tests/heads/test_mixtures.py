"""What mixtures promise beside the contract: log space, what their experts do, and what that costs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from traced import largest_array

from headlab import heads
from headlab.embeddings import Table

VOCAB, WIDTH = 11, 6
EPS = float(np.finfo(np.float32).eps)
SOFTMAXES, SIGSOFTMAXES, CONTEXTS = (
    "mixture_of_softmaxes",
    "mixture_of_sigsoftmaxes",
    "mixture_of_contexts",
)
ALL = (SOFTMAXES, SIGSOFTMAXES, CONTEXTS)


def _build(kind, **options):
    sizes = dict(vocab_size=VOCAB, d_model=WIDTH, rngs=nnx.Rngs(0), vocab_multiple=8)
    return heads.build(kind, **(sizes | options))


_log_probs = nnx.jit(lambda head, h: head.log_probs(h))
_loss = nnx.jit(lambda head, h, ids, where: head.loss(h, ids, where=where))


def _value(module, name):
    return np.asarray(getattr(module, name)[...], np.float64)


def _experts(head, h):
    """Contexts [n, K, d_latent] and prior [n, K] in float64 NumPy."""
    contexts = np.tanh(h @ _value(head.latent, "kernel") + _value(head.latent, "bias"))
    z = h @ _value(head.prior, "kernel")
    prior = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    return contexts.reshape(len(h), head.n_experts, head.d_latent), prior


@nnx.jit
def _paths(head, h, ids):
    """log p(ids) by every path, each [n]."""
    log_probs = head.log_probs(h)
    values, places = head.top_k(h, head.vocab_size)
    loss = head.loss(h, ids)
    at = head.log_prob_at(h, head.normalise(h, None), ids, None)
    return (
        jnp.take_along_axis(log_probs, ids[:, None], axis=1)[:, 0],
        jnp.sum(jnp.where(places == ids[:, None], values, 0), axis=1),
        -head.nll(h, ids),
        at,
        jnp.broadcast_to(-loss.nats / loss.weight, at.shape) if len(ids) == 1 else at,
    )


@pytest.mark.parametrize("kind", ALL)
def test_the_formula_is_that_of_the_paper(kind):
    """Probabilities in float64 NumPy; log-probabilities are sums of some thirty float32 numbers below 10."""
    rng = np.random.default_rng(0)
    head = _build(kind, n_experts=3, d_latent=5, init_scale=4.0)
    h = rng.normal(size=(7, WIDTH)).astype(np.float32)
    contexts, prior = _experts(head, h.astype(np.float64))
    weight = _value(head, "weight")[:VOCAB]
    if kind == CONTEXTS:
        z = np.einsum("nk,nkd,vd->nv", prior, contexts, weight)[:, None]
        prior = np.ones((7, 1))
    else:
        z = contexts @ weight.T
    p = np.exp(z) / (1 + np.exp(-z)) if kind == SIGSOFTMAXES else np.exp(z)
    p = np.einsum("nk,nkv->nv", prior, p / p.sum(axis=2, keepdims=True))
    found = _log_probs(head, jnp.asarray(h))
    np.testing.assert_allclose(found, np.log(p), atol=30 * EPS * 10)


def _sure_head(kind, gap, **options):
    """Two tokens, contexts of 1 to float32's precision, and logits `gap` apart in every expert."""
    head = _build(kind, vocab_size=2, d_model=1, vocab_multiple=1, n_experts=2, **options)
    head.latent.bias[...] = jnp.full(2, 30.0)
    head.weight[...] = jnp.asarray([[0.0], [gap]])
    return head, jnp.ones((1, 1))


@pytest.mark.parametrize("kind", [SOFTMAXES, CONTEXTS])
@pytest.mark.parametrize("gap", [30.0, 300.0])
def test_log_probabilities_have_no_floor(kind, gap):
    """log(p + 1e-8) would stop at −18.4, and a probability of exp(−300) is 0 in float32."""
    head, h = _sure_head(kind, gap)
    for found in _paths(head, h, jnp.array([0])):
        np.testing.assert_allclose(found, [-gap], rtol=2 * EPS)


def test_an_expert_of_vanishing_prior_still_counts_where_it_alone_knows_the_token():
    """Expert 0 (all but exp(−20) of the prior) gives token 0 exp(−90), expert 1 gives it all: log p = −20."""
    head = _build(SOFTMAXES, vocab_size=2, d_model=1, vocab_multiple=1, n_experts=2, d_latent=1)
    head.latent.bias[...] = jnp.asarray([30.0, -30.0])  # contexts 1 and −1
    head.latent.kernel[...] = jnp.zeros((1, 2))
    head.weight[...] = jnp.asarray([[-45.0], [45.0]])
    head.prior.kernel[...] = jnp.asarray([[20.0, 0.0]])
    for found in _paths(head, jnp.ones((1, 1)), jnp.array([0])):
        np.testing.assert_allclose(found, [-20.0], rtol=2 * EPS)


@pytest.mark.parametrize("kind", [SOFTMAXES, SIGSOFTMAXES])
@pytest.mark.parametrize("logit", [200.0, 1e6])
def test_all_prior_mass_on_one_expert_equals_that_experts_softmax(kind, logit):
    head, alone = _build(kind, n_experts=2, init_scale=4.0), _build(kind, n_experts=1)
    h = jnp.abs(jnp.asarray(np.random.default_rng(0).normal(size=(5, WIDTH)), jnp.float32)) + 1
    head.prior.kernel[...] = jnp.zeros((WIDTH, 2)).at[:, 1].set(logit)
    alone.latent.kernel[...] = head.latent.kernel[...][:, WIDTH:]
    alone.weight[...] = head.weight[...]
    ids = jnp.arange(5, dtype=jnp.int32)
    for found, wanted in zip(_paths(head, h, ids), _paths(alone, h, ids), strict=True):
        np.testing.assert_allclose(found, wanted, atol=4 * EPS * 10)
    gradient = nnx.jit(nnx.grad(lambda head: head.loss(h, ids).objective))(head)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("kind", ALL)
def test_equal_experts_equal_one_softmax(kind):
    head, one = _build(kind, n_experts=3, init_scale=4.0), _build(kind, n_experts=1)
    head.latent.kernel[...] = jnp.tile(one.latent.kernel[...], (1, 3))
    one.weight[...] = head.weight[...]
    h = jnp.asarray(np.random.default_rng(0).normal(size=(5, WIDTH)), jnp.float32)
    ids = jnp.arange(5, dtype=jnp.int32)
    for found, wanted in zip(_paths(head, h, ids), _paths(one, h, ids), strict=True):
        np.testing.assert_allclose(found, wanted, atol=8 * EPS * 10)


@pytest.mark.parametrize("kind", ALL)
def test_huge_equal_logits_give_the_log_of_their_count(kind):
    """lse − logit would cancel at 1e8."""
    head, h = _sure_head(kind, 1.0)
    head.weight[...] = jnp.full((2, 1), 1e8)
    for found in _paths(head, h, jnp.array([1])):
        np.testing.assert_allclose(found, [-np.log(2)], rtol=4 * EPS)


def test_one_expert_is_one_softmax_of_its_context_in_both_families():
    softmaxes, contexts = (_build(kind, n_experts=1, init_scale=4.0) for kind in ALL[::2])
    h = jnp.asarray(np.random.default_rng(0).normal(size=(5, WIDTH)), jnp.float32)
    np.testing.assert_allclose(_log_probs(softmaxes, h), _log_probs(contexts, h), atol=4 * EPS * 10)
    for head in (softmaxes, contexts):
        assert head.prior is None  # a prior of one expert would be a parameter without a gradient


# --- experts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
def test_the_metrics_are_the_entropy_of_the_prior_and_the_use_of_experts(kind):
    """Sums over counted positions, so that divided by `weight` they are means; uses sum to 1."""
    head = _build(kind, n_experts=3)
    h = np.random.default_rng(0).normal(size=(5, WIDTH)).astype(np.float32)
    where = np.array([1, 1, 0, 1, 0], bool)
    spoilt = jnp.asarray(np.where(where[:, None], h, np.nan))
    loss = _loss(head, spoilt, jnp.zeros(5, jnp.int32), jnp.asarray(where))
    _, prior = _experts(head, h[where].astype(np.float64))
    assert set(loss.metrics) == {"prior_entropy", "expert_0", "expert_1", "expert_2"}
    assert {(m.shape, str(m.dtype)) for m in loss.metrics.values()} == {((), "float32")}
    uses = [loss.metrics[f"expert_{k}"] for k in range(3)]
    np.testing.assert_allclose(uses, prior.sum(axis=0), rtol=20 * EPS)
    np.testing.assert_allclose(sum(uses), loss.weight, rtol=20 * EPS)
    entropy = -(prior * np.log(prior)).sum()
    np.testing.assert_allclose(loss.metrics["prior_entropy"], entropy, rtol=40 * EPS)


@pytest.mark.parametrize("kind", ALL)
def test_experts_start_different_and_none_starts_alone(kind):
    head = _build(kind, d_model=64)
    kernels = np.split(np.asarray(head.latent.kernel[...]), 4, axis=1)
    correlation = np.corrcoef([k.reshape(-1) for k in kernels])
    # 4,096 independent normals correlate by 1/64; five times that.
    assert np.all(np.abs(correlation - np.eye(4)) < 5 / 64)
    deviations = [k.std() for k in kernels]
    np.testing.assert_allclose(deviations, 1 / 8, rtol=5 / np.sqrt(2 * 4096))
    h = np.random.default_rng(0).normal(size=(4096, 64)).astype(np.float32)
    loss = _loss(head, jnp.asarray(h), jnp.zeros(4096, jnp.int32), None)
    uses = np.array([loss.metrics[f"expert_{k}"] for k in range(4)]) / 4096
    # Logits of standard deviation 1: a prior's is about 0.2, and that of a mean of 4,096 is 0.003.
    np.testing.assert_allclose(uses, 0.25, atol=0.02)


# --- tying, rank, cost ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
def test_a_tied_table_has_one_owner_and_the_gradient_of_both_its_uses(kind):
    head = _build(kind, tied=True)
    table = Table(VOCAB, WIDTH, rngs=nnx.Rngs(1), vocab_multiple=8, init_scale=2.0)
    assert head.weight is None and head.ties_to == "table"
    assert _build(kind).ties_to == "nothing"
    graph, state = nnx.split(table)
    tokens, targets = np.random.default_rng(0).integers(0, VOCAB, (2, 3, 7)).astype(np.int32)

    def loss(input_state, output_state):
        h = jnp.tanh(nnx.merge(graph, input_state)(tokens))
        return head.loss(h, targets, embedding=nnx.merge(graph, output_state)).objective

    (found,) = jax.tree.leaves(jax.jit(jax.grad(lambda s: loss(s, s)))(state))
    parts = jax.tree.leaves(jax.jit(jax.grad(loss, argnums=(0, 1)))(state, state))
    assert min(np.linalg.norm(part) for part in parts) > 0.1  # both matter
    close = 10 * 2.0**-23 * np.linalg.norm(found)
    np.testing.assert_allclose(found, sum(parts), atol=close)


def test_a_tied_head_says_what_table_it_needs():
    head, h = _build(SOFTMAXES, tied=True), jnp.ones((2, WIDTH))
    targets = jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="embedding="):
        head.nll(h, targets)
    for table in (Table(20, WIDTH, rngs=nnx.Rngs(0)), Table(VOCAB, WIDTH, rngs=nnx.Rngs(0))):
        found = table.weight[...].shape
        with pytest.raises(ValueError, match=rf"\({found[0]}, {found[1]}\).*11.*\(16, 6\)"):
            head.nll(h, targets, embedding=table)


@pytest.mark.parametrize(
    ("kind", "options", "bound"),
    [
        (SOFTMAXES, {}, None),
        (SOFTMAXES, dict(n_experts=1), WIDTH + 1),
        (SOFTMAXES, dict(n_experts=1, d_latent=3, bias=True), 5),
        (SOFTMAXES, dict(n_experts=1, softcap=3.0), None),
        (SIGSOFTMAXES, dict(n_experts=1), None),
        (CONTEXTS, {}, WIDTH + 1),
        (CONTEXTS, dict(d_latent=3), 4),
        (CONTEXTS, dict(bias=True), WIDTH + 2),
        (CONTEXTS, dict(softcap=3.0), None),
        (CONTEXTS, dict(d_latent=20), 11),
    ],
)
def test_rank_bounds_are_those_of_the_theorem(kind, options, bound):
    assert _build(kind, **options).rank_bound() == bound


@pytest.mark.parametrize("kind", ALL)
def test_the_rank_bound_is_reached_and_without_one_exceeded(kind):
    head = _build(kind, vocab_size=24, d_latent=3, init_scale=2.0)
    h = np.random.default_rng(0).normal(size=(40, WIDTH))
    log_probs = head.log_probs(h, dtype=np.float64)
    singular = np.linalg.svd(log_probs, compute_uv=False)
    rank = int(np.sum(singular > singular[0] * 400 * np.finfo(float).eps))
    assert rank == 4 if kind == CONTEXTS else rank > 12


def _dense_loss(kind, experts):
    """Σ nll of target 0 on whole arrays, as one writes it first."""

    def loss(h, latent, prior, weight):
        contexts = jnp.tanh(h @ latent).reshape(len(h), experts, -1)
        log_prior = jax.nn.log_softmax(h @ prior)
        if kind == CONTEXTS:
            mixed = jnp.sum(jnp.exp(log_prior)[..., None] * contexts, axis=1)
            return -jnp.sum(jax.nn.log_softmax(mixed @ weight.T)[:, 0])
        logits = contexts.reshape(len(h) * experts, -1) @ weight.T
        own = jax.nn.log_softmax(logits)[:, 0].reshape(len(h), experts)
        return -jnp.sum(jax.nn.logsumexp(log_prior + own, axis=1))

    return loss


@pytest.mark.optimised
@pytest.mark.parametrize("mode", ["training", "scoring", "decoding"])
@pytest.mark.parametrize("kind", [SOFTMAXES, CONTEXTS])
def test_the_cost_is_within_2_percent_of_what_xla_counts(kind, mode):
    """The softmaxes' some ten operations a logit stand against 2·1024 of the multiply."""
    tokens, vocab, width, latent, experts = 32, 1024, 256, 1024, 3
    loss = _dense_loss(kind, experts)
    program = jax.grad(loss, argnums=(0, 1, 2, 3)) if mode == "training" else loss
    shapes = ((tokens, width), (width, experts * latent), (width, experts), (vocab, latent))
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    analysis = jax.jit(program).lower(*arguments).compile().cost_analysis()
    counted = (analysis[0] if isinstance(analysis, list) else analysis)["flops"] / tokens
    options = dict(vocab_size=vocab, d_model=width, d_latent=latent, n_experts=experts)
    cost = nnx.eval_shape(lambda: _build(kind, **options)).cost(mode)
    assert abs(cost.flops_per_token / counted - 1) < 0.02
    own = vocab * latent + width * experts * (latent + 1) + experts * latent
    assert (cost.parameters, cost.bytes_read) == (own, 4 * own)
    options |= dict(d_latent=width, tied=True, bias=True)
    tied = nnx.eval_shape(lambda: _build(kind, **options)).cost(mode)
    assert tied.parameters == width * experts * (width + 1) + experts * width + vocab


def test_neither_an_expert_nor_the_mixture_holds_all_logits():
    """2¹⁰ tokens, 4 experts, 2¹⁶ rows: the largest array of a training step is of a 16th of tokens · V."""
    tokens, vocab, width = 1 << 10, 1 << 16, 8
    head = _build(SOFTMAXES, vocab_size=vocab, d_model=width, init_scale=1.0)
    graph, state = nnx.split(head)
    h = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def loss(state, h, targets):
        return (
            nnx.merge(graph, state)
            .loss(h, targets, z_loss_weight=0.1, label_smoothing=0.1)
            .objective
        )

    largest = largest_array(jax.grad(loss, argnums=(0, 1)), state, h, targets)
    assert largest <= tokens * vocab / 16


@pytest.mark.optimised
def test_memory_is_that_of_one_softmax_of_so_many_more_tokens():
    """Temporary buffers of the compiled nll and its gradients; beside them some arrays of the contexts' size."""
    tokens, vocab, width, experts = 512, 8192, 32, 4

    def temporary(kind, tokens, **options):
        head = _build(kind, vocab_size=vocab, d_model=width, **options)
        graph, state = nnx.split(head)

        def loss(state, h, targets):
            return jnp.sum(nnx.merge(graph, state).nll(h, targets))

        shapes = (
            jax.ShapeDtypeStruct((tokens, width), jnp.float32),
            jax.ShapeDtypeStruct((tokens,), jnp.int32),
        )
        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        program = step.lower(state, *shapes).compile()
        return program.memory_analysis().temp_size_in_bytes

    one = temporary("untied", tokens * experts)
    mixture = temporary(SOFTMAXES, tokens, n_experts=experts)
    assert mixture <= one + 8 * 4 * tokens * experts * width


def test_bfloat16_states_stay_near_float64():
    """At V 50,000: the loss within 1e-2 of float64's, gradients within 2e-2 in norm."""
    tokens, vocab, width = 64, 50_000, 32
    head = _build(SOFTMAXES, vocab_size=vocab, d_model=width, n_experts=2, init_scale=2.0)
    graph, state = nnx.split(head)
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.normal(size=(tokens, width)), jnp.bfloat16)
    targets = rng.integers(0, vocab, tokens).astype(np.int32)

    @jax.jit
    def step(state, h):
        def loss(state, h):
            out = nnx.merge(graph, state).loss(h, targets)
            return out.objective / out.weight

        return jax.value_and_grad(loss, argnums=(0, 1))(state, h)

    value, gradient = step(state, h)
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda a: jnp.asarray(np.asarray(a, np.float64), jnp.float64), (state, h)
        )
        exact, wanted = jax.device_get(step(*wide))
    np.testing.assert_allclose(value, exact, rtol=1e-2)
    for found, right in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
        difference = np.linalg.norm(np.asarray(found, np.float64) - right)
        assert difference <= 2e-2 * np.linalg.norm(right)


# --- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    ("option", "value"),
    [("n_experts", 0), ("n_experts", -1), ("d_latent", 0), ("softcap", 0.0), ("logit_scale", 0.0)],
)
def test_options_out_of_range_are_refused_by_value(kind, option, value):
    with pytest.raises(ValueError, match=f"{option} is {value!r}; it must be"):
        _build(kind, **{option: value})


@pytest.mark.parametrize("kind", ALL)
def test_tied_contexts_of_another_width_than_the_table_are_refused(kind):
    with pytest.raises(ValueError, match="d_latent is 5 and d_model 6; .*tied=False"):
        _build(kind, tied=True, d_latent=5)
    assert _build(kind, tied=True, d_latent=WIDTH).ties_to == "table"
