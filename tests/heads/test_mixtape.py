"""What mixtape promises beside the contract: gates of frequent tokens, one normaliser, any order of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn
from flax import nnx
from traced import largest_array

from headlab import heads
from headlab.embeddings import Constant, Table

VOCAB, WIDTH, GATE = 13, 6, 3
COUNTS = np.array([4, 9, 1, 7, 0, 2, 11, 3, 5, 5, 8, 2, 6])
FREQUENT = [1, 3, 6, 10]  # the four largest counts, by id
EPS = float(np.finfo(np.float32).eps)


def _build(**options):
    sizes = dict(
        vocab_size=VOCAB,
        d_model=WIDTH,
        rngs=nnx.Rngs(0),
        vocab_multiple=8,
        token_counts=COUNTS,
        d_gate=GATE,
        frequent_share=0.3,
    )
    return heads.build("mixtape", **(sizes | options))


def _embedding(tied, **options):
    """The input embedding that the model builds for `_build(tied=tied)`."""
    given = dict(vocab_multiple=8, token_counts=COUNTS, frequent_share=0.3, tied=tied)
    cls = heads.get("mixtape")
    return cls.input_embedding(
        vocab_size=VOCAB, d_model=WIDTH, rngs=nnx.Rngs(1), **(given | options)
    )


_log_probs = nnx.jit(lambda head, h: head.log_probs(h))
_nll = nnx.jit(lambda head, h, ids: head.nll(h, ids))


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _drawn(seed=0, **options):
    """The head with every parameter drawn afresh, biases and padding rows too."""
    rng = np.random.default_rng(seed)
    return drawn(lambda: _build(**options), lambda shape: rng.normal(size=shape))


def _array(module, name):
    return np.asarray(getattr(module, name)[...], np.float64)


def _paper_log_probs(head, h, weight_by_id):
    """[n, V] for four experts, a token at a time, in float64."""
    h = np.asarray(h, np.float64)
    z = np.zeros((len(h), VOCAB))
    rest = [v for v in range(VOCAB) if v not in FREQUENT]
    contexts = np.tanh(h @ _array(head.context, "kernel")).reshape(len(h), 4, -1)
    vectors = np.tanh(h @ _array(head.gate_context, "kernel")).reshape(len(h), 3, GATE)
    shared = h @ _array(head.shared, "kernel")
    for v in range(VOCAB):
        if v in FREQUENT:
            row, part = FREQUENT.index(v), head.frequent
            own = vectors @ _array(head.gate, "weight")[row] + _array(head.gate, "bias")[row]
        else:
            row, part, own = rest.index(v), head.rest, 0
        a, b, c = _sigmoid(own + shared).T
        priors = np.stack([a * b, a * (1 - b), (1 - a) * c, (1 - a) * (1 - c)], axis=1)
        weight = _array(part, "weight")[row] if weight_by_id is None else weight_by_id[v]
        z[:, v] = np.einsum("nk,nkd,d->n", priors, contexts, weight) + _array(part, "bias")[row]
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("tied", [False, True])
def test_the_formula_is_that_of_the_paper_in_any_order_of_tokens(tied):
    """Sums of some thirty float32 numbers below 20."""
    head = _drawn(tied=tied, bias=True)
    table = _embedding(tied, init_scale=2.0)
    rng = np.random.default_rng(1)
    h = jnp.asarray(rng.normal(size=(VOCAB, WIDTH)), jnp.float32)
    ids = jnp.asarray(rng.permutation(VOCAB), jnp.int32)
    by_id = np.asarray(table(jnp.arange(VOCAB)), np.float64) if tied else None
    wanted = _paper_log_probs(head, h, by_id)
    close = 30 * EPS * 20

    @jax.jit
    def paths(h):
        at = head.log_prob_at(h, head.normalise(h, table), ids, table)
        nll = head.nll(h, ids, embedding=table)
        return head.log_probs(h, embedding=table), at, nll, head.top_k(h, 5, embedding=table)

    log_probs, at, nll, (values, places) = paths(h)
    np.testing.assert_allclose(log_probs, wanted, atol=close)
    own = np.take_along_axis(wanted, np.asarray(ids)[:, None], axis=1)[:, 0]
    np.testing.assert_allclose(at, own, atol=close)
    np.testing.assert_allclose(nll, -own, atol=close)
    np.testing.assert_allclose(values, np.take_along_axis(wanted, places, axis=1), atol=close)
    np.testing.assert_array_equal(places, np.argsort(-wanted, axis=1)[:, :5])


def test_a_tied_head_gives_the_bands_of_the_embedding_the_gradient_of_its_rows():
    tied, untied = _drawn(tied=True), _drawn()
    assert (tied.ties_to, untied.ties_to) == ("adaptive", "nothing")
    for name in ("context", "gate_context", "shared"):
        getattr(tied, name).kernel[...] = getattr(untied, name).kernel[...]
    tied.gate.weight[...] = untied.gate.weight[...]
    tied.gate.bias[...] = untied.gate.bias[...]
    table = _embedding(True)
    segments = (untied.frequent, untied.rest)
    for band, segment in zip(table.bands, segments, strict=True):
        band.weight[...] = segment.weight[...]
    rest = [v for v in range(VOCAB) if v not in FREQUENT]
    by_id = table(jnp.arange(VOCAB))
    np.testing.assert_array_equal(by_id[np.array(FREQUENT)], untied.frequent.weight[...][:4])
    np.testing.assert_array_equal(by_id[np.array(rest)], untied.rest.weight[...][:9])
    h = jnp.asarray(np.random.default_rng(0).normal(size=(9, WIDTH)), jnp.float32)
    targets = jnp.arange(9, dtype=jnp.int32)
    found = nnx.jit(nnx.grad(lambda t, m: m.loss(h, targets, embedding=t).objective))(table, tied)
    wanted = nnx.jit(nnx.grad(lambda m: m.loss(h, targets).objective))(untied)
    for band, name, real in ((0, "frequent", 4), (1, "rest", 9)):
        rows = np.asarray(found["bands"][band]["weight"][...])
        np.testing.assert_allclose(rows, wanted[name]["weight"][...], atol=20 * EPS * 9)
        assert np.any(rows[:real]) and not np.any(rows[real:])


def test_the_gates_of_a_frequent_token_move_its_own_logit_alone():
    head = _drawn()
    h = jnp.asarray(np.random.default_rng(0).normal(size=(3, WIDTH)), jnp.float32)
    before = np.asarray(_log_probs(head, h))
    for gates in (head.gate.weight, head.gate.bias):
        gates[...] = gates[...].at[2].add(1.0)  # of FREQUENT[2]
        after = np.asarray(_log_probs(head, h))
        # Relative to another token, what does not move is the same to rounding.
        change = (after - after[:, :1]) - (before - before[:, :1])
        moved = np.abs(change) > 30 * EPS * 20
        assert np.flatnonzero(moved.any(axis=0)).tolist() == [FREQUENT[2]]
        before = after


def test_a_closed_gate_takes_the_context_of_one_side():
    """All gates at 1: every token has the first context alone, and the head is linear in it."""
    head, h = _drawn(), jnp.abs(jnp.ones((3, WIDTH)))
    head.shared.kernel[...] = jnp.full((WIDTH, 3), 1e4)
    context = np.tanh(np.asarray(h, np.float64) @ _array(head.context, "kernel"))[:, :WIDTH]
    weight = np.concatenate([_array(head.frequent, "weight")[:4], _array(head.rest, "weight")[:9]])
    z = context @ weight.T
    wanted = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    found = np.asarray(_log_probs(head, h))[:, np.asarray(head.order.token[...])]
    np.testing.assert_allclose(found, wanted, atol=30 * EPS * 10)
    gradient = nnx.jit(nnx.grad(lambda m: jnp.sum(m.nll(h, jnp.arange(3)))))(head)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_the_order_is_saved_and_stands_for_the_counts():
    """A head built without counts, given the constants of another, is that other; no gradient reaches them."""
    head, blank = _build(), _build(token_counts=None, rngs=nnx.Rngs(7))
    assert head.order.token[...].tolist()[:4] == FREQUENT
    assert blank.order.token[...].tolist() == list(range(VOCAB))
    _, params, constants = nnx.split(head, nnx.Param, Constant)
    graph, _, other = nnx.split(blank, nnx.Param, Constant)
    assert jax.tree.structure(constants) == jax.tree.structure(other)
    again = nnx.merge(graph, params, constants)
    h = jnp.asarray(np.random.default_rng(0).normal(size=(3, WIDTH)), jnp.float32)
    np.testing.assert_array_equal(_log_probs(again, h), _log_probs(head, h))


@pytest.mark.parametrize(
    ("share", "counts", "frequent"),
    [
        (0.3, COUNTS, FREQUENT),
        (1e-6, COUNTS, [6]),  # one at least
        (0.3, np.ones(VOCAB), [0, 1, 2, 3]),  # equal counts: by id
        (0.3, None, [0, 1, 2, 3]),
        (1.0, COUNTS, list(range(VOCAB))),
    ],
)
def test_frequent_tokens_are_those_of_the_largest_counts(share, counts, frequent):
    head = _build(frequent_share=share, token_counts=counts)
    names = [(s.name, s.size) for s in head.segments()]
    rest = VOCAB - len(frequent)
    assert names == [("frequent", len(frequent)), *([("rest", rest)] if rest else [])]
    assert head.order.token[...].tolist()[: len(frequent)] == frequent


@pytest.mark.parametrize("size", [1e8, -1e8])
def test_huge_equal_logits_in_both_segments_give_the_log_of_their_count(size):
    head = _build(d_model=1, n_experts=2)
    head.context.kernel[...] = jnp.full((1, 2), 30.0)  # contexts of 1
    for segment in (head.frequent, head.rest):
        segment.weight[...] = jnp.full(segment.weight.shape, size)
    ids = jnp.arange(VOCAB, dtype=jnp.int32)
    nll = _nll(head, jnp.ones((VOCAB, 1)), ids)
    np.testing.assert_allclose(nll, np.log(VOCAB), rtol=4 * EPS)


def test_one_expert_is_a_linear_head_over_its_context():
    head = _drawn(n_experts=1, frequent_share=0.5)
    assert head.gate is None and head.shared is None and head.frequent is None
    h = jnp.asarray(np.random.default_rng(0).normal(size=(3, WIDTH)), jnp.float32)
    linear = heads.build("untied", vocab_size=VOCAB, d_model=WIDTH, rngs=nnx.Rngs(0))
    linear.weight[...] = head.rest.weight[...][:VOCAB]
    context = jnp.tanh(h @ head.context.kernel[...])
    close = 30 * EPS * 20
    np.testing.assert_allclose(_log_probs(head, h), _log_probs(linear, context), atol=close)
    assert head.rank_bound() == WIDTH + 1


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        (dict(d_latent=3), 3 + 1 + 4),
        (dict(d_latent=3, bias=True), 3 + 1 + 4 + 1),
        (dict(d_latent=3, frequent_share=0.1), 3 + 1 + 1),
        (dict(d_latent=20), VOCAB),
        (dict(frequent_share=1.0), None),
        (dict(softcap=3.0), None),
        (dict(n_experts=1, d_latent=3, bias=True), 5),
    ],
)
def test_rank_bounds_are_those_of_the_theorem_and_are_reached(options, bound):
    """A shared context leaves the rest of the columns at rank d_latent; each frequent column may add one."""
    head = _drawn(**options)
    assert head.rank_bound() == bound
    h = np.random.default_rng(0).normal(size=(40, WIDTH))
    log_probs = head.log_probs(h, dtype=np.float64)
    singular = np.linalg.svd(log_probs, compute_uv=False)
    rank = int(np.sum(singular > singular[0] * 400 * np.finfo(float).eps))
    assert rank == (VOCAB if bound is None else bound)


def _dense_loss(experts, frequent):
    """Σ nll of target 0 on whole arrays, as one writes it first."""

    def loss(h, context, vectors, shared, weight, rest, gate):
        contexts = jnp.tanh(h @ context).reshape(len(h), experts, -1)
        states = jnp.tanh(h @ vectors).reshape(len(h), experts - 1, -1)
        common = h @ shared
        gates = jnp.einsum("njg,vg->njv", states, gate) + common[:, :, None]
        products = jnp.einsum("nkd,vd->nkv", contexts, weight)

        def mixed(leaves, gates):
            a, b, c = (jax.nn.sigmoid(g) for g in gates)
            w, x, y, z = leaves
            return a * (b * w + (1 - b) * x) + (1 - a) * (c * y + (1 - c) * z)

        first = mixed([products[:, k] for k in range(4)], [gates[:, j] for j in range(3)])
        context = mixed([contexts[:, k] for k in range(4)], [common[:, j, None] for j in range(3)])
        logits = jnp.concatenate([first, context @ rest.T], axis=1)
        return -jnp.sum(jax.nn.log_softmax(logits)[:, 0])

    return loss


@pytest.mark.optimised
@pytest.mark.parametrize("mode", ["training", "scoring", "decoding"])
def test_the_cost_is_within_2_percent_of_what_xla_counts(mode):
    """The gates' some thirty operations a frequent logit stand against 2·(4·1024 + 3·64)."""
    tokens, vocab, frequent, width, latent, gate = 32, 1280, 256, 256, 1024, 64
    loss = _dense_loss(4, frequent)
    program = jax.grad(loss, argnums=tuple(range(7))) if mode == "training" else loss
    shapes = (
        (tokens, width),
        (width, 4 * latent),
        (width, 3 * gate),
        (width, 3),
        (frequent, latent),
        (vocab - frequent, latent),
        (frequent, gate),
    )
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    analysis = jax.jit(program).lower(*arguments).compile().cost_analysis()
    counted = (analysis[0] if isinstance(analysis, list) else analysis)["flops"] / tokens
    options = dict(vocab_size=vocab, d_model=width, frequent_share=0.2, token_counts=None)
    head = nnx.eval_shape(lambda: _build(**options, d_latent=latent, d_gate=gate))
    cost = head.cost(mode)
    assert abs(cost.flops_per_token / counted - 1) < 0.02
    own = sum(np.prod(s) for s in shapes[1:]) + 3 * frequent
    assert (cost.parameters, cost.bytes_read) == (own, 4 * own)
    with pytest.raises(ValueError, match="'serving'.*'training', 'scoring' or 'decoding'"):
        head.cost("serving")


def test_sharing_gates_saves_most_of_the_work():
    """The paper's tenth: below a mixture of softmaxes by more than half, above a linear head."""
    options = dict(vocab_size=8192, d_model=128, rngs=nnx.Rngs(0))
    flops = {
        name: heads.build(name, **options).cost("training").flops_per_token
        for name in ("untied", "mixtape", "mixture_of_softmaxes")
    }
    assert flops["untied"] < flops["mixtape"] < flops["mixture_of_softmaxes"] / 2


def test_no_array_of_all_logits_of_an_expert_is_held():
    tokens, vocab, width = 1 << 12, 1 << 16, 8
    head = _build(vocab_size=vocab, d_model=width, token_counts=None, frequent_share=0.5)
    graph, params, constants = nnx.split(head, nnx.Param, Constant)
    h = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def loss(params, h, constants, targets):
        head = nnx.merge(graph, params, constants)
        return head.loss(h, targets, z_loss_weight=0.1, label_smoothing=0.1).objective

    step = jax.grad(loss, argnums=(0, 1))
    assert largest_array(step, params, h, constants, targets) <= tokens * vocab / 16


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("n_experts", 0),
        ("n_experts", 3),
        ("n_experts", -4),
        ("d_latent", 0),
        ("d_gate", 0),
        ("frequent_share", 0.0),
        ("frequent_share", 1.5),
        ("frequent_share", float("nan")),
        ("softcap", -1.0),
    ],
)
def test_options_out_of_range_are_refused_by_value(option, value):
    with pytest.raises(ValueError, match=f"{option} is {value!r}; it must be"):
        _build(**{option: value})


def test_tied_contexts_of_another_width_than_the_table_are_refused():
    with pytest.raises(ValueError, match="d_latent is 5 and d_model 6; .*tied=False"):
        _build(tied=True, d_latent=5)


def test_a_tied_head_refuses_an_embedding_of_other_bands():
    head, h, ids = _build(tied=True), jnp.ones((2, WIDTH)), jnp.zeros(2, jnp.int32)
    for other, reason in (
        (None, "not NoneType"),
        (Table(VOCAB, WIDTH, rngs=nnx.Rngs(1), vocab_multiple=8), "not Table"),
        (_embedding(True, frequent_share=0.5), r"cutoffs \(6,\) .* the head has \(4,\)"),
    ):
        with pytest.raises(ValueError, match=reason):
            head.nll(h, ids, embedding=other)


def test_counts_of_another_vocabulary_are_refused():
    with pytest.raises(ValueError, match=r"token_counts are \(12,\); they must be \(13,\)"):
        _build(token_counts=COUNTS[1:])
