"""The adaptive softmax: cutoffs and order, clusters, tying, the penalty of z-loss."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adaptive_heads import COUNTS, VOCAB, WIDTH, build, embedding_of, perturbed, states
from flax import nnx
from jax.scipy.special import logsumexp

from headlab import heads
from headlab.embeddings import Constant, Table

EPS = float(np.finfo(np.float32).eps)


def bands_of(head, counts):
    """The ids of each band, ascending, by their descending counts."""
    by_count = np.argsort(-np.asarray(counts), kind="stable")
    edges = itertools.pairwise((0, *head.cutoffs, head.vocab_size))
    return [np.sort(by_count[a:b]) for a, b in edges]


def dense(head, h, counts, embedding=None):
    """(log_probs by token id, the lse of the head, those of the tails) by whole matrices."""
    bands = bands_of(head, counts)
    shortlist, n_tails = len(bands[0]), len(bands) - 1

    def rows(name, shared):
        parts = [shared[:shortlist] if head.tied else shared[: shortlist + n_tails]]
        return jnp.concatenate(
            parts + ([getattr(head.standing, name)[...]] if head.standing else [])
        )

    own = rows("weight", embedding.bands[0].weight[...] if head.tied else head.weight[...])
    z = h @ own.T
    if head.bias is not None:
        z = z + rows("bias", head.bias[...])
    logits = head.spec.logit_map.scale * z
    cap = head.spec.logit_map.softcap
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    if head.cluster_offset:
        logits = logits + jnp.log(jnp.asarray([1] * shortlist + [len(b) for b in bands[1:]]))
    head_lse = logsumexp(logits, axis=1)
    log_head = logits - head_lse[:, None]
    out = jnp.zeros((len(h), head.vocab_size), log_head.dtype)
    out = out.at[:, bands[0]].set(log_head[:, :shortlist])
    tails = []
    for i, ids in enumerate(bands[1:]):
        band = embedding.bands[i + 1] if head.tied else head.tails[i]
        kernel = band.kernel[...].T if head.tie_projections else head.tails[i].kernel[...]
        t = head.spec.logit_map.scale * (h @ kernel @ band.weight[: len(ids)].T)
        t = t if cap is None else cap * jnp.tanh(t / cap)
        tails.append(logsumexp(t, axis=1))
        within = t - tails[-1][:, None]
        out = out.at[:, ids].set(log_head[:, shortlist + i, None] + within)
    return out, head_lse, tails


VARIANTS = {
    "untied": {},
    "bias, cap, negative scale": dict(head_bias=True, softcap=2.0, logit_scale=-0.7),
    "no offset": dict(cluster_offset=False),
    "tied": dict(tied=True),
    "tied, projections too": dict(tied=True, tie_projections=True, head_bias=True),
    "one cluster": dict(cutoffs=()),
    "one cluster, tied": dict(cutoffs=(), tied=True),
    "a tail of one token": dict(cutoffs=(4, 10)),
    "a shortlist of one token": dict(cutoffs=(1, 2)),
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_log_probs_nll_and_loss_are_those_of_whole_matrices(options):
    """At every token, so at every cutoff's boundary, in an order that is not that of ids; Σ p = 1."""
    head = perturbed(lambda: build(**options))
    embedding = perturbed(lambda: embedding_of(head)) if head.tied else None
    h, targets = 2 * states(VOCAB), jnp.arange(VOCAB)
    where = targets != 3

    @nnx.jit
    def everything(head, embedding):
        regularised = dict(embedding=embedding, where=where, z_loss_weight=0.1)
        return (
            dense(head, h, COUNTS, embedding),
            head.log_probs(h, embedding=embedding),
            head.nll(h, targets, embedding=embedding),
            head.loss(h, targets, **regularised),
        )

    (expected, head_lse, tail_lses), log_probs, nll, loss = everything(head, embedding)
    close = 64 * EPS * float(jnp.abs(expected).max())
    np.testing.assert_allclose(log_probs, expected, rtol=0, atol=close)
    np.testing.assert_allclose(logsumexp(log_probs, axis=1), 0, atol=close)
    wanted = -expected[targets, targets]
    np.testing.assert_allclose(nll, wanted, rtol=0, atol=close)
    penalty = head_lse**2
    for ids, lse in zip(bands_of(head, COUNTS)[1:], tail_lses, strict=True):
        penalty = penalty + jnp.where(jnp.isin(targets, ids), lse**2, 0)
    objective = jnp.sum(jnp.where(where, wanted + 0.1 * penalty, 0))
    np.testing.assert_allclose(loss.objective, objective, rtol=64 * EPS)
    np.testing.assert_allclose(loss.nats, jnp.sum(jnp.where(where, wanted, 0)), rtol=64 * EPS)
    in_tails = len(set(range(VOCAB)) - {3} - set(bands_of(head, COUNTS)[0].tolist()))
    assert loss.weight == VOCAB - 1 and loss.metrics == {"tail_tokens": in_tails}


@pytest.mark.parametrize("projections", [False, True])
def test_a_tied_table_has_one_gradient_of_both_its_uses(projections):
    """States made of the embedding itself: look-up and output add up once each, as automatic differentiation does."""
    head = perturbed(lambda: build(tied=True, tie_projections=projections))
    modules = (head, perturbed(lambda: embedding_of(head)))
    ids, targets = jnp.arange(VOCAB), (jnp.arange(VOCAB) * 3) % VOCAB
    graphs, params, constants = zip(
        *(nnx.split(m, nnx.Param, Constant) for m in modules), strict=True
    )

    def ours(params, kind):
        head, embedding = map(nnx.merge, graphs, params, constants)
        h = embedding(ids)
        if kind == "nll":
            return jnp.sum(head.nll(h, targets, embedding=embedding))
        return head.loss(h, targets, embedding=embedding).objective

    def wanted(params):
        head, embedding = map(nnx.merge, graphs, params, constants)
        bands = bands_of(head, COUNTS)
        rows = [embedding.bands[i].weight[: len(b)] for i, b in enumerate(bands)]
        rows[1:] = [r @ embedding.bands[i + 1].kernel[...] for i, r in enumerate(rows[1:])]
        h = jnp.concatenate(rows)[np.argsort(np.concatenate(bands))]
        return -jnp.sum(dense(head, h, COUNTS, embedding)[0][ids, targets])

    expected = jax.jit(jax.grad(wanted))(params)
    assert len(jax.tree.leaves(expected)) == (1 if projections else 3) + 5
    for kind in ("loss", "nll"):
        found = jax.jit(jax.grad(ours), static_argnums=1)(params, kind)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=256 * EPS * float(jnp.abs(b).max()))


def test_one_cluster_is_a_linear_head():
    """Untied and tied, bit for bit but for the order of sums."""
    h, targets = states(9), jnp.arange(9)
    head = build(cutoffs=())
    plain = heads.build(
        "untied", vocab_size=VOCAB, d_model=WIDTH, rngs=nnx.Rngs(0), vocab_multiple=8
    )
    np.testing.assert_array_equal(head.weight[...], plain.weight[...])
    np.testing.assert_allclose(head.nll(h, targets), plain.nll(h, targets), rtol=16 * EPS)
    assert head.rank_bound() == plain.rank_bound() == WIDTH + 1
    assert head.cost("training") == plain.cost("training")
    tied = build(cutoffs=(), tied=True)
    embedding = embedding_of(tied)
    table = Table(VOCAB, WIDTH, rngs=nnx.Rngs(1), vocab_multiple=8)
    one = heads.build("tied", vocab_size=VOCAB, d_model=WIDTH, rngs=nnx.Rngs(0), vocab_multiple=8)
    np.testing.assert_allclose(
        tied.log_probs(h, embedding=embedding), one.log_probs(h, embedding=table), atol=32 * EPS
    )


def test_tokens_of_some_clusters_alone_leave_the_others_untouched():
    """A tail of NaN that no target is in: value and gradient of the loss are finite, the tail's own exactly zero."""
    head = build()
    graph, params, constants = nnx.split(head, nnx.Param, Constant)
    params["tails"][0]["weight"] = params["tails"][0]["weight"].replace(
        jnp.full_like(head.tails[0].weight[...], jnp.nan)
    )
    bands = bands_of(head, COUNTS)
    targets = jnp.asarray(np.concatenate([bands[0], bands[2], bands[2]]))

    @jax.jit
    @jax.value_and_grad
    def loss(params, targets):
        return nnx.merge(graph, params, constants).loss(states(10), targets).objective

    value, gradient = loss(params, targets)
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))
    assert not any(np.any(g) for g in jax.tree.leaves(gradient["tails"][0]))
    value, _ = loss(params, targets.at[4].set(bands[1][0]))
    assert np.isnan(value)


@pytest.mark.parametrize("n", [0, 1, 3, 4, 8, 11])
def test_as_many_tokens_as_a_cluster_has_rows_and_none_at_all(n):
    head = perturbed(lambda: build())
    h, targets = states(n), jnp.asarray(bands_of(head, COUNTS)[1].repeat(3)[:n], jnp.int32)

    @nnx.jit
    def everything(head, h):
        loss = jax.value_and_grad(lambda h: head.loss(h, targets).objective)
        return dense(head, h, COUNTS)[0], head.nll(h, targets), loss(h)

    log_probs, nll, (loss, gradient) = everything(head, h)
    wanted = -log_probs[jnp.arange(n), targets]
    np.testing.assert_allclose(nll, wanted, rtol=0, atol=256 * EPS)
    np.testing.assert_allclose(loss, jnp.sum(wanted), rtol=64 * EPS)
    assert np.isfinite(gradient).all()


def test_unknown_ids_give_nan_where_they_count_and_nothing_where_not():
    head = build()
    ids, where = jnp.asarray([1, -1, 11, -100, 2]), jnp.asarray([True, True, True, False, True])

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def both(h):
        return head.loss(h, ids, where=where).objective, head.nll(h, ids, where=where)

    (loss, nll), gradient = both(states(5))
    assert np.isnan(nll).tolist() == [False, True, True, False, False] and nll[3] == 0
    assert np.isnan(loss) and np.isnan(gradient[1]).all() and not np.any(gradient[3])


def test_the_first_loss_is_the_log_of_the_vocabulary_thanks_to_the_offset():
    """Uniform targets at V 8,192; the tails without their offset would start as probable as one token each."""
    vocab, width = 8192, 128
    rng = np.random.default_rng(0)
    h = rng.normal(size=(512, width))
    h = jnp.asarray(h / np.sqrt((h**2).mean(axis=1, keepdims=True)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, vocab, 512))
    first = {}
    for offset in (True, False):
        options = dict(cutoffs=(512, 2048), div_value=4.0, token_counts=None)
        head = build(vocab, width, cluster_offset=offset, **options)
        loss = nnx.jit(lambda head: head.loss(h, targets))(head)
        first[offset] = float(loss.nats / loss.weight)
    assert abs(first[True] / np.log(vocab) - 1) < 0.05
    # p(tail) is about 1/514 in place of its share: the loss is Σ share·log(514·size) over bands of 512, 1536 and 6144.
    without = sum(n / vocab * np.log(514 * m) for n, m in ((512, 1), (1536, 1536), (6144, 6144)))
    assert abs(first[False] / without - 1) < 0.05


def test_bfloat16_states_and_float32_parameters_mix():
    head = build(vocab=500, width=32, cutoffs=(50, 200), token_counts=None)
    h, targets = states(64, 32), jnp.asarray(np.random.default_rng(0).integers(0, 500, 64))
    graph, params, constants = nnx.split(head, nnx.Param, Constant)

    @jax.jit
    @jax.value_and_grad
    def loss(arrays):
        return nnx.merge(graph, arrays[0], constants).loss(arrays[1], targets).objective

    exact, (wanted, dh) = loss((params, h))
    value, (found, narrow) = loss((params, h.astype(jnp.bfloat16)))
    assert narrow.dtype == jnp.bfloat16 and abs(value / exact - 1) < 1e-2
    for a, b in zip(jax.tree.leaves((found, narrow)), jax.tree.leaves((wanted, dh)), strict=True):
        difference = np.linalg.norm(np.asarray(a, np.float64) - np.asarray(b, np.float64))
        assert difference < 2e-2 * np.linalg.norm(b)


def test_the_penalty_of_a_normaliser_is_what_a_drawn_token_is_charged():
    head = perturbed(lambda: build())
    h = states(5)
    log_probs, head_lse, tail_lses = nnx.jit(lambda head: dense(head, h, COUNTS))(head)
    expected = head_lse**2
    for ids, lse in zip(bands_of(head, COUNTS)[1:], tail_lses, strict=True):
        expected = expected + jnp.sum(jnp.exp(log_probs[:, ids]), axis=1) * lse**2
    found = nnx.jit(lambda head: head.z_penalty(head.normalise(h, None)))(head)
    np.testing.assert_allclose(found, expected, rtol=64 * EPS)


def test_the_order_of_tokens_is_saved_and_makes_a_head_without_counts_the_same():
    """As when a run is opened: the head is built without counts, and its constants are read beside its parameters."""
    head, h = build(), states(4)
    _, params, constants = nnx.split(head, nnx.Param, Constant)
    assert len(jax.tree.leaves(constants)) == 2
    graph, _, _ = nnx.split(build(token_counts=None), nnx.Param, Constant)
    opened = nnx.merge(graph, params, constants)
    np.testing.assert_array_equal(opened.log_probs(h), head.log_probs(h))
    assert not np.allclose(build(token_counts=None).log_probs(h), head.log_probs(h))
