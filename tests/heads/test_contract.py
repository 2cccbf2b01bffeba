"""Promises about values that every registered head keeps, against its dense float64 formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from headlab import heads


def test_every_head_has_a_dense_reference(name, contract):
    assert name in contract.references, (
        f"The head {name!r} has no dense float64 formula: add one line to REFERENCES in tests/reference_heads.py "
        "(its logits on whole matrices, and the values of its options that the cases should combine)."
    )
    unknown = set(contract.references[name].options) - set(heads.options(name))
    assert not unknown, f"REFERENCES[{name!r}] names options that the head does not have: {unknown}"


def test_log_probs_equal_the_dense_formula_and_normalise(problem, contract):
    log_probs = problem.score(problem.params, problem.h)["log_probs"]
    assert log_probs.shape == (*contract.batch, contract.vocab)
    assert log_probs.dtype == jnp.float32
    close = problem.value_tolerance
    np.testing.assert_allclose(log_probs, problem.dense_log_probs, atol=close)
    total = np.logaddexp.reduce(np.asarray(log_probs, np.float64), axis=-1)
    np.testing.assert_allclose(total, 0, atol=close)


def test_every_path_gives_the_same_value(problem, contract):
    """nll, loss, log_prob_at, top_k and entropy against the dense formula: a map applied twice or not at all shows."""
    expected, close = problem.dense_log_probs, problem.value_tolerance
    score = problem.score(problem.params, problem.h)
    target = np.take_along_axis(expected, problem.targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(score["nll"], -target, atol=close)
    np.testing.assert_allclose(score["log_prob_at"].reshape(contract.batch), target, atol=close)
    loss, count = score["loss"], problem.where.sum()
    np.testing.assert_allclose(loss.nats, -target[problem.where].sum(), atol=count * close)
    assert loss.weight == count and loss.objective == loss.nats
    values, ids = score["top_k"]
    assert np.array_equal(np.sort(ids, axis=-1), np.broadcast_to(range(contract.vocab), ids.shape))
    np.testing.assert_allclose(values, np.take_along_axis(expected, ids, axis=-1), atol=close)
    assert np.all(np.diff(values, axis=-1) <= 0)
    # d(p·log p) = (1 + log p)·dp, and dp is p·close: below close·(Σp + Σp|log p|).
    wanted = -(np.exp(expected) * expected).sum(axis=-1)
    np.testing.assert_allclose(score["entropy"], wanted, atol=close * (1 + np.log(contract.vocab)))
    assert {a.dtype for a in (score["nll"], loss.nats, values, score["entropy"])} == {
        np.dtype("float32")
    }


def test_smoothing_and_z_loss_follow_their_formula(problem):
    (loss, _), _ = problem.step(
        problem.params, problem.h, problem.targets, problem.where, 1.0, 0.0 * problem.where
    )
    expected = problem.dense_objective[problem.where.reshape(-1)].sum()
    # lse² doubles the relative error of lse, which is below the largest log-probability plus the largest logit.
    np.testing.assert_allclose(loss.objective, expected, rtol=4 * problem.value_tolerance)
    pure = problem.score(problem.params, problem.h)["loss"]
    np.testing.assert_allclose(loss.nats, pure.nats, rtol=problem.value_tolerance)
    assert loss.objective != loss.nats


def test_smoothing_is_refused_where_the_head_says_so(name, make, contract):
    problem = make(contract.loaded_case(name))
    head, _ = problem.modules(problem.params)

    def smoothed():
        return problem.call("loss", problem.params, problem.h, problem.targets, label_smoothing=0.1)

    if head.smoothing_refused:
        with pytest.raises(ValueError, match="label_smoothing=0.1: "):
            smoothed()
    else:
        assert jax.eval_shape(smoothed).objective.shape == ()


def test_a_position_depends_on_its_own_state_alone(problem, contract):
    """All other states are NaN, and the value at the position is what it was."""
    where = np.zeros(contract.batch, bool)
    where[1, 3] = True
    lonely = jnp.where(where[..., None], problem.h, jnp.nan)
    alone, among = problem.score(problem.params, lonely), problem.score(problem.params, problem.h)
    for path in ("log_probs", "nll", "entropy"):
        assert np.isnan(alone[path]).sum() > 0
        np.testing.assert_allclose(
            alone[path][1, 3], among[path][1, 3], atol=problem.value_tolerance
        )
    values = (alone["top_k"][0][1, 3], among["top_k"][0][1, 3])
    np.testing.assert_allclose(*values, atol=problem.value_tolerance)


def test_padding_never_enters(problem, contract):
    """Whatever stands in padding rows: no probability, no place in top_k, no change of any bit."""
    spoilt = problem.with_rows(lambda leaf, ids: leaf.at[len(ids) :].set(1e4))
    before, after = problem.score(problem.params, problem.h), problem.score(spoilt, problem.h)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a, b)
    assert before["top_k"][1].max() == contract.vocab - 1


@pytest.mark.in_turn(("dtype",), [("float32",), ("bfloat16",)])
def test_an_unknown_id_is_nan_where_counted_and_nothing_where_not(name, dtype, make, contract):
    problem = make(contract.case_of(name, dtype))
    at = jax.jit(problem.log_prob_at)
    everywhere = np.ones(contract.batch, bool)
    for unknown in (-1, -100, 11, 15, 16, 2**31 - 1):
        targets = problem.targets.copy()
        targets[1, 2] = unknown
        place = targets == unknown
        arguments = (1.0, 0.0 * problem.where)
        (loss, nll), _ = problem.step(problem.params, problem.h, targets, everywhere, *arguments)
        np.testing.assert_array_equal(np.isnan(nll), place)
        found = at(problem.params, problem.h, jnp.asarray(targets))
        np.testing.assert_array_equal(np.isnan(found).reshape(place.shape), place)
        assert np.isnan(loss.objective) and np.isnan(loss.nats)
        (loss, nll), gradient = problem.step(problem.params, problem.h, targets, ~place, *arguments)
        assert nll[1, 2] == 0 and np.isfinite(nll).all()
        assert np.isfinite(loss.objective) and loss.weight == place.size - 1
        assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in jax.tree.leaves(gradient))


@pytest.mark.quick()
@pytest.mark.in_turn(
    ("dtype", "token_block", "row_block"),
    [("float32", 7, 6), ("bfloat16", 1, 1), ("float32", None, None), ("bfloat16", 7, 6)],
)
def test_results_do_not_depend_on_block_sizes(name, dtype, token_block, row_block, make, contract):
    """Those of the case, everything at once, single rows, and remainders on both axes agree within rounding."""
    case = contract.case_of(name, dtype)

    def run(**blocks):
        problem = make(case, **blocks)
        arguments = (problem.targets, problem.where, 1.0, 0.5 * problem.where)
        score = problem.score(problem.params, problem.h)
        paths = [score[p] for p in ("log_probs", "nll", "log_prob_at", "entropy")]
        return (
            problem,
            [*paths, score["top_k"][0]],
            problem.step(problem.params, problem.h, *arguments),
        )

    problem, values, (_, gradient) = run()
    _, cut_values, (_, cut_gradient) = run(token_block=token_block, row_block=row_block)
    for a, b in zip(values, cut_values, strict=True):
        np.testing.assert_allclose(a, b, atol=2 * problem.value_tolerance)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(cut_gradient), strict=True):
        difference, norm = contract.error(a, b)
        assert difference <= 2 * problem.gradient_tolerance * norm


def test_float64_log_probs_are_the_dense_formula_to_float64_rounding(problem, contract):
    """Sums of a few numbers below 20: some ten roundings of 20 · 2⁻⁵³ ≈ 2e-15, and 1e-12 is far from float32's 1e-6."""
    log_probs = problem.call("log_probs", problem.params, problem.h, dtype=np.float64)
    assert log_probs.dtype == np.float64
    np.testing.assert_allclose(log_probs, problem.dense_log_probs, rtol=0, atol=1e-12)
    np.testing.assert_allclose(np.logaddexp.reduce(log_probs, axis=-1), 0, atol=1e-14)
    assert jax.tree.leaves(problem.params)[0].dtype == jnp.float32  # the parameters are left alone


def test_float64_log_probs_refuse_traced_inputs(name, make, contract):
    problem = make(contract.loaded_case(name))

    def traced(params, h):
        return problem.call("log_probs", params, h, dtype=jnp.float64)

    for transform in (jax.jit, jax.vmap, lambda f: jax.grad(lambda h: f(h).sum())):
        with pytest.raises(TypeError, match=r"float64.*traced"):
            transform(lambda h: traced(problem.params, h))(problem.h)
    if jax.tree.leaves(problem.params[0]) or problem.ties_to != "nothing":
        with pytest.raises(TypeError, match="float64.*traced"):
            jax.jit(lambda params: traced(params, problem.h))(problem.params)


def test_log_probs_come_in_the_asked_dtype(name, make, contract):
    problem = make(contract.loaded_case(name))
    full = problem.score(problem.params, problem.h)["log_probs"]
    in_bfloat16 = jax.jit(lambda p, h: problem.call("log_probs", p, h, dtype=jnp.bfloat16))
    small = in_bfloat16(problem.params, problem.h)
    assert small.dtype == jnp.bfloat16
    # one rounding to eight bits, of a value that another program may have rounded otherwise
    close = problem.value_tolerance
    np.testing.assert_allclose(small.astype(jnp.float32), full, rtol=2.0**-8, atol=close)


@pytest.mark.in_turn(("k",), [(4,), (11,), (1,), (0,)])
def test_top_k_is_the_head_of_a_stable_sort(name, k, make, contract):
    """Two tokens of each segment are made equal in every parameter: the lower id comes first."""
    problem = make(contract.loaded_case(name))
    pairs = [(int(ids[0]), int(ids[-1])) for ids in problem.segment_ids() if len(ids) > 1]

    def equal(leaf, ids):
        places = {int(token): row for row, token in enumerate(ids)}
        for first, last in pairs:
            if first in places and last in places:
                leaf = leaf.at[places[last]].set(leaf[places[first]])
        return leaf

    params = problem.with_rows(equal)
    log_probs = np.asarray(problem.score(params, problem.h)["log_probs"])
    values, ids = jax.jit(lambda p, h: problem.call("top_k", p, h, k))(params, problem.h)
    assert values.shape == ids.shape == (*contract.batch, k)
    assert ids.dtype == jnp.int32
    found = np.take_along_axis(log_probs, np.asarray(ids), axis=-1)
    np.testing.assert_allclose(values, found, atol=problem.value_tolerance)
    order = np.argsort(-log_probs, axis=-1, kind="stable")[..., :k]
    np.testing.assert_array_equal(ids, order)


@pytest.mark.parametrize("k", [-1, 12])
def test_top_k_refuses_what_the_vocabulary_does_not_have(name, k, make, contract):
    problem = make(contract.loaded_case(name))
    with pytest.raises(ValueError, match=rf"k is {k}; it must be in 0 … 11"):
        problem.call("top_k", problem.params, problem.h, k)


@pytest.mark.quick()
@pytest.mark.in_turn(("shape",), [((),), ((0,),), ((1,),), ((2, 0, 3),)])
def test_any_batch_shape_works(name, shape, make, contract):
    problem = make(contract.loaded_case(name))
    h, targets = jnp.ones((*shape, contract.width)), jnp.zeros(shape, jnp.int32)

    @jax.jit
    def everything(params, h):
        scored = [problem.call("nll", params, h, targets)]
        scored += [problem.call("log_probs", params, h), problem.call("top_k", params, h, 2)[1]]
        scored += [problem.call("entropy", params, h)]
        grad = jax.grad(lambda *a: problem.call("loss", *a, targets).objective, argnums=(0, 1))
        return scored, grad(params, h), problem.call("loss", params, h, targets)

    scored, gradient, loss = everything(problem.params, h)
    assert [a.shape for a in scored] == [
        shape,
        (*shape, contract.vocab),
        (*shape, 2),
        shape,
    ]
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))
    assert loss.weight == np.prod(shape) and (loss.weight or loss.nats == 0)


@pytest.mark.quick()
def test_the_rank_of_log_probabilities_keeps_to_the_bound(name, contract):
    """More contexts than tokens, weights at scale 1/√d, all in float64."""
    vocab, width, contexts = 24, 5, 40
    rng = np.random.default_rng(0)
    h = rng.normal(size=(contexts, width))
    choices = contract.one_by_one(name)
    for chosen in (choices[0], choices[-1]):
        graphs, states, constants = contract.initial(name, vocab, width, init_scale=1.0, **chosen)
        drawn = jax.tree.map(
            lambda a: np.float32(a + rng.normal(size=a.shape) / width**0.5), states[0]
        )
        head, embedding = map(nnx.merge, graphs, (drawn, states[1]), constants)
        log_probs = head.log_probs(h, embedding=embedding, dtype=np.float64)
        singular = np.linalg.svd(log_probs, compute_uv=False)
        # Rounding alone leaves singular values up to √(40·24)·largest·2⁻⁵³·(some ten roundings).
        rank = int(np.sum(singular > singular[0] * 40 * 10 * np.finfo(float).eps))
        bound = head.rank_bound()
        where = f"{name} with {chosen}: rank {rank}, bound {bound}"
        if bound is None:
            assert rank > width + 2, f"{where}: this head could promise more than None"
        else:
            assert rank <= bound <= vocab, where


@pytest.mark.parametrize("mode", ["training", "scoring", "decoding"])
def test_the_cost_counts_the_heads_own_real_parameters(name, mode, make, contract):
    for options in (contract.default_case(name), contract.loaded_case(name)):
        plain, padded = (make(options._replace(vocab_multiple=m)) for m in (1, 8))
        own = sum(a.size for a in jax.tree.leaves(plain.params[0]))
        for problem in (plain, padded):
            cost = problem.modules(problem.params)[0].cost(mode)
            assert cost.parameters == own
            assert cost.flops_per_token > 0 and cost.bytes_read > 0


def test_segments_hold_every_token_once(name, make, contract):
    """The ids of all blocks, in the head's own order: each once, ascending within a segment."""
    problem = make(contract.loaded_case(name))
    everything: list = []
    for ids in problem.segment_ids():
        assert np.all(np.diff(ids) > 0)
        everything.extend(ids)
    assert sorted(everything) == list(range(contract.vocab))
