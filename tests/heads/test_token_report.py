"""All that scoring asks of a token comes from one walk, and equals the dense float64 distribution, for every head."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from traced import largest_array

from headlab import sharding

ONE_PASS = ("tied", "untied", "low_rank", "sigsoftmax", "mixture_of_contexts")
ONE_SOFTMAX = (*ONE_PASS, "mixtape")


def dense(problem):
    """By the dense float64 log-probabilities: (those, the ids in order, entropy), all flat."""
    log_probs = problem.dense_log_probs.reshape(-1, problem.dense_log_probs.shape[-1])
    return log_probs, np.argsort(-log_probs, kind="stable"), -(np.exp(log_probs) * log_probs).sum(1)


@pytest.mark.in_turn(("dtype", "k"), [("float32", 3), ("bfloat16", 0), ("float32", 11)])
def test_the_report_is_the_dense_distributions(name, dtype, k, make, contract):
    problem = make(contract.case_of(name, dtype))
    close = problem.value_tolerance
    log_probs, order, entropy = dense(problem)
    places = np.argsort(order, axis=1)  # the inverse permutation: the place of each id
    gaps = np.diff(np.sort(log_probs, axis=1)).min()
    for token in range(contract.vocab):
        ids = np.full(contract.batch, token, np.int32)
        found = jax.tree.map(
            lambda a: np.asarray(a).reshape(len(order), *a.shape[2:]),
            problem.report(problem.params, problem.h, ids, k),
        )
        np.testing.assert_allclose(found.log_prob, log_probs[:, token], atol=close)
        if gaps > 2 * close:  # else rounding may exchange two tokens
            np.testing.assert_array_equal(found.rank, places[:, token] + 1)
    assert gaps > 2 * close or dtype == "bfloat16"
    assert found.top_ids.shape == found.top_log_probs.shape == (len(order), k)
    chosen = np.take_along_axis(log_probs, found.top_ids, axis=1)
    np.testing.assert_allclose(found.top_log_probs, chosen, atol=close)
    np.testing.assert_allclose(chosen, -np.sort(-log_probs)[:, :k], atol=2 * close)
    np.testing.assert_allclose(found.entropy, entropy, atol=close * (1 + np.log(contract.vocab)))
    assert found.rank.dtype == found.top_ids.dtype == np.int32
    assert (found.lse is not None) == (name in ONE_SOFTMAX)


def test_a_large_vocabulary_is_reported_within_1e_5_of_float64(contract):
    """8,192 tokens by 128 numbers, as the small model has, with logits of standard deviation 2."""
    vocab, width, tokens = 8192, 128, 48
    head, _ = contract.modules("untied", vocab, width)
    rng = np.random.default_rng(0)
    h, weight = (rng.normal(size=(n, width)).astype(np.float32) for n in (tokens, vocab))
    weight *= np.float32(2 / width**0.5)
    head.weight[...] = jnp.asarray(weight)
    ids = rng.integers(0, vocab, tokens).astype(np.int32)
    found = jax.jit(lambda h, ids: head.token_report(h, ids, 5))(h, ids)
    logits = h.astype(np.float64) @ weight.astype(np.float64).T
    lse = logits.max(1) + np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1))
    log_probs = logits - lse[:, None]
    np.testing.assert_allclose(found.lse, lse, atol=1e-5)
    np.testing.assert_allclose(found.log_prob, log_probs[np.arange(tokens), ids], atol=1e-5)
    np.testing.assert_allclose(found.top_log_probs, -np.sort(-log_probs, axis=1)[:, :5], atol=1e-5)
    entropy = -(np.exp(log_probs) * log_probs).sum(1)
    np.testing.assert_allclose(found.entropy, entropy, atol=1e-5)


@pytest.mark.parametrize("head", ["untied", "sigsoftmax", "mixtape"])
def test_the_log_partition_is_what_the_z_loss_squares(head, make, contract):
    problem = make(contract.loaded_case(head))

    @jax.jit
    def both(params, h):
        head, embedding = problem.modules(params)
        penalty = head.z_penalty(head.normalise(h.reshape(-1, contract.width), embedding))
        return head.token_report(h, problem.targets, embedding=embedding).lse, penalty

    lse, penalty = both(problem.params, problem.h)
    np.testing.assert_allclose(np.ravel(lse) ** 2, penalty, rtol=1e-5)


@pytest.mark.in_turn(("k",), [(1,), (11,)])
def test_the_rank_is_the_place_among_the_top(name, k, make, contract):
    """Also where two tokens are equal in every parameter, which a compiler may still round to different numbers."""
    problem = make(contract.loaded_case(name))
    params = problem.with_rows(
        lambda leaf, ids: leaf.at[len(ids) - 1].set(leaf[0]) if len(ids) > 1 else leaf
    )
    for token in range(contract.vocab):
        ids = np.full(contract.batch, token, np.int32)
        found = problem.report(params, problem.h, ids, k)
        listed = np.asarray(found.top_ids) == token
        np.testing.assert_array_equal(listed.any(-1), np.asarray(found.rank) <= k)
        np.testing.assert_array_equal(
            listed.argmax(-1)[listed.any(-1)] + 1, found.rank[listed.any(-1)]
        )


def test_equally_probable_tokens_are_ranked_by_their_ids(make, contract):
    """A state of zeros makes all equal; the lower id comes first, beyond the top, too."""
    problem = make(contract.default_case("untied"))
    ids = np.arange(contract.vocab, dtype=np.int32)
    zeros = jnp.zeros((contract.vocab, contract.width))
    report = problem.call("token_report", problem.params, zeros, ids, 3)
    np.testing.assert_array_equal(report.rank, ids + 1)
    np.testing.assert_array_equal(report.top_ids, np.tile(ids[:3], (contract.vocab, 1)))


def test_an_unknown_id_has_no_log_probability_and_no_rank(name, make, contract):
    problem = make(contract.loaded_case(name))
    for unknown in (-1, 11, 15, 2**31 - 1):
        targets = problem.targets.copy()
        targets[1, 2] = unknown
        report = problem.report(problem.params, problem.h, targets, 3)
        np.testing.assert_array_equal(np.isnan(report.log_prob), targets == unknown)
        np.testing.assert_array_equal(report.rank == 0, targets == unknown)


@pytest.mark.quick()
@pytest.mark.in_turn(("vocab",), [(8,), (2,), (4,)])
def test_shards_of_the_vocabulary_report_as_one(name, vocab, make, contract):
    problem = make(contract.loaded_case(name))

    def body(params, h, targets):
        return problem.call("token_report", params, h, targets, 3)

    sharded = sharding.on_mesh(
        body,
        sharding.make_mesh(1, vocab),
        in_specs=(problem.specs(), sharding.REPLICATED, sharding.REPLICATED),
        out_specs=sharding.REPLICATED,
    )
    arrays = (problem.params, problem.h, problem.targets)
    found, wanted = jax.jit(sharded)(*arrays), problem.report(*arrays, 3)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=4 * problem.value_tolerance)
    np.testing.assert_array_equal(found.rank, wanted.rank)
    np.testing.assert_array_equal(found.top_ids, wanted.top_ids)


@pytest.mark.parametrize("head", ["untied", "low_rank"])
def test_an_order_of_sums_reports_the_same(head, make, contract):
    """Of linear heads, which otherwise walk once."""
    problem = make(contract.loaded_case(head))

    @functools.partial(jax.jit, static_argnums=2)
    def report(params, h, blocks):
        head, embedding = problem.modules(params)
        head.sum_in_blocks(blocks)
        return head.token_report(h, problem.targets, 3, embedding=embedding)

    found, wanted = (report(problem.params, problem.h, blocks) for blocks in (8, None))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=4 * problem.value_tolerance)


@pytest.mark.optimised
@pytest.mark.slow
@pytest.mark.in_turn(("vocab",), [(8,), (2,), (4,)])
def test_an_order_of_sums_reports_the_same_bits_on_any_number_of_shards(
    name, vocab, make, contract
):
    """Eight blocks of rows; log-probability, rank, top, entropy and log-partition of forty tokens."""
    problem = make(contract.loaded_case(name))
    h = jax.random.normal(jax.random.key(0), (5, 8, contract.width))
    targets = (np.arange(40, dtype=np.int32) * 7 % contract.vocab).reshape(5, 8)

    def body(params, h, targets):
        head, embedding = problem.modules(params)
        head.sum_in_blocks(8)
        return head.token_report(h, targets, 3, embedding=embedding)

    one, many = (
        jax.jit(
            sharding.on_mesh(
                body,
                sharding.make_mesh(1, n),
                in_specs=(problem.specs(), sharding.REPLICATED, sharding.REPLICATED),
                out_specs=sharding.REPLICATED,
            )
        )(problem.params, h, targets)
        for n in (1, vocab)
    )
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        np.testing.assert_array_equal(a, b)


def _lowered(name, contract, tokens, vocab, width, **options):
    modules = nnx.eval_shape(lambda: contract.modules(name, vocab, width, **options))
    graphs, states, constants = contract.split(modules)

    def report(states, constants, h, ids):
        head, embedding = map(nnx.merge, graphs, states, constants)
        return head.token_report(h, ids, 5, embedding=embedding)

    h = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
    return report, (states, constants, h, jax.ShapeDtypeStruct((tokens,), jnp.int32))


def test_no_array_of_all_log_probabilities_is_reported_from(name, contract):
    tokens, vocab = 1 << 12, (1 << 17) - 5
    options = {k: v[-1] for k, v in contract.references[name].options.items()}
    report, shapes = _lowered(name, contract, tokens, vocab, 8, vocab_multiple=128, **options)
    assert largest_array(report, *shapes) <= tokens * vocab / 16


@pytest.mark.optimised
@pytest.mark.parametrize("head", ["untied", "mixture_of_softmaxes"])
def test_8192_tokens_of_a_large_vocabulary_are_scored_in_300_megabytes(head, contract):
    """All logits would be 4.3 GB; d_model is 1,024, so that the states alone are 34 MB, and a mixture's 134 MB."""
    options = {"n_experts": 2} if head == "mixture_of_softmaxes" else {}
    report, shapes = _lowered(head, contract, 8192, 131072, 1024, **options)
    compiled = jax.jit(report).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 300e6


def test_the_top_is_of_the_vocabulary(make, contract):
    problem = make(contract.loaded_case("untied"))
    for k in (-1, 12):
        with pytest.raises(ValueError, match=f"k is {k}; it must be in 0 … 11"):
            problem.call("token_report", problem.params, problem.h, problem.targets, k)
