"""The claims: rules of verdicts, each measure beside an independent expectation."""

import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats

from experiments.claims import (
    arithmetic,
    choices,
    findings,
    numerics,
    runs,
    scale,
    shards,
    trained,
)
from experiments.claims.findings import DEPENDS, FAILS, HOLDS, Interval
from headlab import analysis, heads, models
from headlab.config import load
from headlab.errors import HeadlabError, UsageError

V, D = 40, 8


# --- rules -------------------------------------------------------------------------------------------------------


def test_an_interval_is_students_and_paired_by_seed():
    values, baseline = {0: 1.0, 1: 1.5, 2: 1.25}, {2: 1.0, 1: 1.125, 0: 0.5}
    reference = stats.ttest_rel(
        [values[s] for s in range(3)], [baseline[s] for s in range(3)]
    ).confidence_interval(0.95)
    found = findings.interval(values, baseline)
    np.testing.assert_allclose(found[1:], (reference.low, reference.high))
    with pytest.raises(ValueError, match="two seeds"):
        findings.interval({0: 1.0})


@pytest.mark.parametrize(
    ("low", "high", "above", "at_most"),
    [(0.1, 0.3, HOLDS, FAILS), (-0.3, -0.1, FAILS, HOLDS), (-0.1, 0.1, DEPENDS, DEPENDS)],
)
def test_an_interval_that_straddles_the_limit_depends(low, high, above, at_most):
    found = Interval((low + high) / 2, low, high)
    assert (findings.above(found, 0), findings.at_most(found, 0)) == (above, at_most)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(2, 3, HOLDS), (0.1, 0.9, FAILS), (4.1, 5, FAILS), (0.5, 2, DEPENDS), (0, 9, DEPENDS)],
)
def test_an_interval_holds_within_a_range_fails_outside_and_else_depends(low, high, verdict):
    assert findings.between(Interval((low + high) / 2, low, high), 1, 4) == verdict


def test_a_round_number_is_met_within_a_tenth_and_countings_that_differ_depend():
    assert [findings.near(value, 10) for value in (9, 11, 8.9, 11.1)] == [
        HOLDS,
        HOLDS,
        FAILS,
        FAILS,
    ]
    assert findings.together([HOLDS, HOLDS]) == HOLDS
    assert findings.together([FAILS, FAILS]) == FAILS
    assert findings.together([HOLDS, FAILS]) == DEPENDS


# --- measures ----------------------------------------------------------------------------------------------------


def test_arithmetic_is_that_of_the_published_shapes():
    micro = arithmetic.micro_size(None)
    body = 128 * 128 + 4 * (12 * 128**2 + 2 * 128) + 128
    assert micro.figures["tied"] == 8192 * 128 + body
    assert micro.figures["untied"] == 2 * 8192 * 128 + body and micro.verdict == HOLDS
    assert arithmetic.micro_finding({"tied": 1_852_544, "untied": 2_901_121}).verdict == FAILS
    d, vocab, layers = 2304, 256_128, 26
    block = 2 * d * 256 * (8 + 4) + 3 * d * 9216
    blocks = arithmetic.head_blocks(None)
    assert blocks.figures["matrices"] == pytest.approx(vocab * d / block)
    assert blocks.figures["shorthand"] == pytest.approx(vocab / (12 * d))
    assert blocks.verdict == DEPENDS
    weights = arithmetic.head_bytes(None).figures["weights"]
    assert weights == pytest.approx(vocab * d / (vocab * d + layers * (block + 4 * d) + d))
    size = arithmetic.decode_size(None).figures
    llama = 32 * (4 * 4096**2 + 3 * 4096 * 11_008 + 2 * 4096) + 4096
    assert size["body"] == pytest.approx(llama / (layers * (block + 4 * d) + d))


@pytest.fixture(scope="module")
def head():
    return heads.build("untied", vocab_size=V, d_model=D, rngs=nnx.Rngs(0), vocab_multiple=64)


@pytest.fixture(scope="module")
def states():
    return np.random.default_rng(0).normal(size=(60, D)).astype(np.float32)


def test_rank_is_the_theorems_and_a_head_above_it_would_be_seen(head, states):
    assert numerics.rank_of(head, states) == D + 1
    assert numerics.rank_finding({"a": 9, "b": 8}, 9, 20).verdict == HOLDS
    assert numerics.rank_finding({"a": 9, "b": 10}, 9, 20).verdict == FAILS
    assert numerics.rank_finding({"a": 9}, 9, 9).verdict == FAILS  # a measure that sees no more


@pytest.mark.parametrize(
    ("error", "flips", "near", "verdict"),
    [(0.01, 10, 9, HOLDS), (0.01, 10, 8, DEPENDS), (0.1, 0, 0, FAILS), (0.1, 10, 10, DEPENDS)],
)
def test_bfloat16_holds_for_an_error_of_a_hundredth_and_flips_of_near_ties(
    error, flips, near, verdict
):
    audit = analysis.Audit(analysis.Variant(), 99, flips, 20, near, 0.5, error, (0, 1), 0, 0.0)
    assert numerics.bfloat16_finding({0: audit, 1: audit}).verdict == verdict


def test_padding_is_drawn_as_often_as_its_zero_logits_say_and_never_masked(head, states):
    bare, hidden = numerics.all_rows(head, states, None)
    logits = np.asarray(states, np.float64) @ np.asarray(head.weight[...], np.float64).T / 2
    share = np.exp(logits[:, V:]).sum(axis=1) / np.exp(logits).sum(axis=1)
    found = numerics.drawn(bare, V, 2.0, 6000, 0)
    assert found.draws == 6000 and found.probability == pytest.approx(share.mean(), rel=1e-5)
    error = math.sqrt(found.probability * (1 - found.probability) / found.draws)
    assert abs(found.padding / found.draws - found.probability) < 5 * error
    never = numerics.drawn(hidden, V, 2.0, 6000, 0)
    assert (never.padding, never.probability) == (0, 0)
    assert numerics.padding_finding({0: found}, {0: never}).verdict == HOLDS
    assert numerics.padding_finding({0: found, 1: never}, {0: never}).verdict == FAILS
    assert numerics.padding_finding({0: found}, {0: found}).verdict == FAILS


@pytest.mark.optimised
def test_the_whole_matrix_grows_with_the_vocabulary_and_blocks_do_not():
    tokens, vocab = 512, 65_536
    small, large = (scale.memory(tokens, size, 16) for size in (vocab, 2 * vocab))
    assert small["whole"] >= 4 * tokens * vocab and large["whole"] >= 8 * tokens * vocab
    assert large["blockwise"] < 1.01 * small["blockwise"] < small["whole"]
    assert scale.memory_finding({"whole": 100, "blockwise": 10}).verdict == HOLDS
    assert scale.memory_finding({"whole": 99, "blockwise": 10}).verdict == DEPENDS
    assert scale.memory_finding({"whole": 10, "blockwise": 10}).verdict == FAILS


def test_operations_of_a_full_softmax_grow_as_the_vocabulary_and_the_rule_takes_both_measures():
    small, large = (scale.cost("untied", vocab, 4, 16, 1) for vocab in (256, 1024))
    assert small[0] == 2 * 16 * 256 and scale.growth(small[0], large[0], 4) == 1
    assert min(small[1], large[1]) > 0
    full = {"untied_operations": 1.0, "untied_cpu_time": 1.0}
    for operations, seconds, verdict in (
        (0.5, 0.8, HOLDS),
        (0.5, 1.1, DEPENDS),
        (1.0, 1.1, FAILS),
        (0.5, 0.9, DEPENDS),
    ):
        own = {"adaptive_operations": operations, "adaptive_cpu_time": seconds}
        assert scale.growth_finding({**own, **full}).verdict == verdict


@pytest.fixture(scope="module")
def small_model():
    config = load(
        str(runs.ROOT / "configs" / "tiny.py"),
        [("model.d_model", "8"), ("model.n_layers", "1"), ("head.vocab_multiple", "8")],
    )
    return models.build(config, V)


def test_the_two_roles_gradients_sum_to_that_of_the_tied_table(small_model):
    rng = np.random.default_rng(0)
    inputs, targets = rng.integers(0, V // 2, (2, 3, 6)).astype(np.int32)
    looked_up, output = trained.role_gradients(small_model, inputs, targets)
    graph, params, constants = models.split(small_model)

    def nats(params):
        model = models.merge(graph, params, constants)
        log_probs = model.head.log_probs(model(inputs), embedding=model.embedding)
        return -jnp.take_along_axis(log_probs, targets[..., None], axis=-1).sum()

    whole = jax.jit(jax.grad(nats))(params)["embedding"]["weight"]
    np.testing.assert_allclose(looked_up + output, whole, atol=1e-5)
    unseen = np.setdiff1d(np.arange(V), inputs)
    assert not looked_up[unseen].any() and output[unseen].any()
    assert trained.input_share(np.array([[3.0]]), np.array([[4.0]])) == 9 / 25


def test_rare_tokens_are_of_those_that_text_has():
    counts = np.array([0, 50, 3, 90, 0, 2, *range(10, 24)])
    assert trained.rare_ids(counts).tolist() == [5]  # a tenth of 18 that occur
    assert trained.frequent_ids(counts).tolist() == [3]
    bands = {"bands": [1.0] * 5 + [2.0, 4.0, None, None, None], "band_tokens": [9] * 5 + [3, 1, 0, 0, 0]}  # fmt: skip
    assert trained.band_loss({"validation": bands}) == (3 * 2 + 4) / 4


def spread(mean):
    """Three seeds whose paired differences from `spread(0)` all are the mean."""
    return {seed: mean + seed / 8 for seed in range(3)}


def test_trained_claims_follow_the_interval_of_their_difference():
    wide = {0: -1.0, 1: 0.0, 2: 1.0}
    zero = dict.fromkeys(range(3), 0.0)
    for difference, verdict in ((0.5, HOLDS), (-0.5, FAILS)):
        assert trained.mass_finding(spread(difference), spread(0)).verdict == verdict
    assert trained.mass_finding(wide, zero).verdict == DEPENDS
    for difference, verdict in ((0.0, HOLDS), (0.015625, HOLDS), (0.03125, FAILS)):
        found = trained.matched_finding(spread(difference), spread(0), spread(1), 10, 11)
        assert found.verdict == verdict
    assert trained.matched_finding(wide, zero, zero, 10, 11).verdict == DEPENDS
    one = dict.fromkeys(range(3), 1.0)
    assert trained.norm_finding(spread(2), spread(1)).verdict == HOLDS
    assert trained.norm_finding(one, one).verdict == FAILS
    assert trained.norm_finding({0: 0.0, 1: 1.0, 2: 2.0}, one).verdict == DEPENDS
    assert trained.share_finding({0: 0.9, 1: 0.8, 2: 0.9}, one).verdict == HOLDS
    assert trained.share_finding({0: 0.1, 1: 0.2, 2: 0.1}, one).verdict == FAILS


# --- multiple choice ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asked():
    tokens = np.random.default_rng(0).integers(0, V, 12 * 7)
    return choices.questions(tokens, number=12, options=3, prompt=5, answer=2)


def test_questions_have_the_true_continuation_once_among_others_of_the_text(asked):
    windows = np.random.default_rng(0).integers(0, V, 12 * 7).reshape(12, 7)
    np.testing.assert_array_equal(asked.prompts, windows[:, :5])
    everywhere = {tuple(row) for row in windows[:, 5:].tolist()}
    for answers, truth, window in zip(asked.answers.tolist(), asked.truth, windows, strict=True):
        assert answers[truth] == window[5:].tolist()
        assert len({tuple(one) for one in answers}) == 3
        assert {tuple(one) for one in answers} <= everywhere
    with pytest.raises(UsageError, match="83 tokens; 12 questions of 7 tokens need 84"):
        choices.questions(np.zeros(83, int), number=12, options=3, prompt=5, answer=2)


def test_scores_are_those_of_the_scoring_package(asked, small_model):
    from headlab.scoring import choose

    h, targets = choices.answer_states(small_model, asked)
    scores = choices.sums(choices._scored(small_model, h, targets), 3, 2)
    for i in (0, 7):
        found = choose(small_model, asked.prompts[i].tolist(), asked.answers[i].tolist())
        np.testing.assert_allclose(scores[i], [one.log_prob for one in found], rtol=1e-5)


def test_text_is_right_where_it_equals_the_answer_and_ties_share_a_lenient_readers_credit():
    answers = np.array([[[1, 2], [1, 3], [4, 5]]] * 4)
    asked = choices.Questions(np.zeros((4, 1), int), answers, np.array([0, 0, 0, 2]))
    texts = np.array([[1, 2], [1, 9], [9, 2], [1, 3]])
    true, _ = choices.shared_prefix(texts, asked)
    assert true.tolist() == [2, 1, 0, 0]
    np.testing.assert_allclose(choices.credit(texts, asked), [1, 1 / 2, 1 / 3, 0])
    same = dict.fromkeys(range(3), 0.5)
    assert choices.accuracy_finding(spread(1), spread(0), spread(0)).verdict == HOLDS
    assert choices.accuracy_finding(same, same, same).verdict == FAILS
    assert choices.accuracy_finding(spread(1), spread(0), spread(1)).verdict == DEPENDS


def test_a_bit_is_drift_in_either_order_and_a_changed_choice_is_a_flip():
    one = np.array([[-1.0, -2.0], [-3.0, -3.5]])
    moved = one.copy()
    moved[0] = np.nextafter(-1.0, 0), -0.5
    found = {("fast", 1): one, ("fast", 2): moved, ("invariant", 1): one, ("invariant", 2): one}
    assert choices.drifts(found)["fast", 2] == choices.Drift(2, 4, 1.5, 1)
    assert choices.drifts(found)["invariant", 2] == choices.Drift(0, 4, 0.0, 0)
    assert choices.drift_finding(found, "scores").verdict == HOLDS
    assert choices.drift_finding({**found, ("fast", 2): one}, "scores").verdict == FAILS
    assert choices.drift_finding({**found, ("invariant", 2): moved}, "scores").verdict == FAILS


# --- one trained experiment --------------------------------------------------------------------------------------

TINY = {
    "data.vocab_size": "280",
    "data.seq_len": "8",
    "model.d_model": "8",
    "model.n_layers": "1",
    "model.n_heads": "1",
    "model.max_length": "8",
    "train.steps": "2",
    "train.batch_size": "2",
    "optimizer.warmup_steps": "1",
    "eval.every": "2",
    "checkpoint.every": "2",
    "log.tensorboard": "false",
    "log.progress": "false",
}


def test_the_text_is_every_eighth_document_and_is_read_once(tmp_path, monkeypatch):
    from headlab import data

    corpus = types.SimpleNamespace(documents=lambda split: (f"{split} {i}" for i in range(20)))
    monkeypatch.setattr(data, "open_corpus", lambda name: corpus)
    path = runs.english_sample(tmp_path / "new" / "english.txt")
    assert path.read_text() == "train 0\n\ntrain 8\n\ntrain 16"
    monkeypatch.setattr(data, "open_corpus", None)
    assert runs.english_sample(path).read_text().startswith("train 0")


def test_the_runs_are_four_models_in_three_seeds_with_untieds_parameters(tmp_path, monkeypatch):
    from headlab import sweeps

    seen = []

    def finished(plan, folder, **options):
        seen.extend(plan.points)
        return [types.SimpleNamespace(state="finished") for _ in plan.points]

    monkeypatch.setattr(sweeps, "run", finished)
    found = runs.Context(tmp_path, corpus="text:nothing.txt").runs
    assert set(found) == {"tied", "untied", "wide", "deep"}
    assert all(sorted(by_seed) == [0, 1, 2] for by_seed in found.values())
    sizes = {runs.variant(point.overrides): sweeps.size(point.config).parameters for point in seen}
    for name in ("wide", "deep"):
        assert abs(sizes[name] / sizes["untied"] - 1) <= 0.005
    failed = types.SimpleNamespace(state="failed", name="head=tied", error="NaN")
    monkeypatch.setattr(sweeps, "run", lambda *a, **k: [failed])
    with pytest.raises(HeadlabError, match="head=tied: NaN"):
        _ = runs.Context(tmp_path, corpus="text:nothing.txt").runs


@pytest.fixture(scope="module")
def one_run(small_corpus, tmp_path_factory):
    from headlab import training

    path = tmp_path_factory.mktemp("claims") / "tied"
    options = [*TINY.items(), ("data.corpus", small_corpus)]
    training.train(load(str(runs.ROOT / "configs" / "tiny.py"), options), str(path))
    return path


@pytest.mark.slow
@pytest.mark.optimised
def test_the_worker_gives_the_heads_own_log_probabilities_on_every_mesh(
    one_run, tmp_path, monkeypatch
):
    held = analysis.held_out_states(one_run, 40)
    np.savez(tmp_path / "states.npz", h=held.h, targets=held.targets)
    monkeypatch.setattr(shards, "SHARDS", (1, 8))
    shards.main([str(one_run), str(tmp_path / "states.npz"), str(tmp_path / "out.npz")])
    model = held.restored.model
    whole = analysis.log_prob_matrix(model.head, held.h, embedding=model.embedding)
    exact = np.concatenate(list(whole))[np.arange(40), held.targets]
    with np.load(tmp_path / "out.npz") as found:
        assert len(found.files) == 4
        for name in found.files:
            np.testing.assert_allclose(found[name], exact, rtol=1e-5)
        np.testing.assert_array_equal(found["invariant-8"], found["invariant-1"])


def test_measures_read_the_runs_that_they_are_given(one_run, tmp_path, monkeypatch):
    """The same run under every name and seed: figures are its own, and differences are zero."""
    monkeypatch.setattr(runs, "POSITIONS", 40)
    context = runs.Context(tmp_path)
    names = ("tied", "untied", "wide", "deep")
    context.runs = {name: {0: one_run, 1: one_run} for name in names}
    held = context.held_out(one_run)
    model = held.restored.model
    whole = analysis.log_prob_matrix(model.head, held.h, embedding=model.embedding)
    probability = np.exp(np.concatenate(list(whole)))[np.arange(40), held.inputs].mean()
    mass = trained.self_repetition(context)
    assert mass.figures["tied"] == pytest.approx(probability, rel=1e-5)
    assert mass.verdict == FAILS and mass.figures["difference"] == (0, 0, 0)
    norm = trained.rare_norms(context)
    rows = np.linalg.norm(np.asarray(model.embedding.weight[...])[:280], axis=1)
    assert rows.min() <= norm.figures["untied"] <= rows.max() and norm.verdict == FAILS
    with pytest.raises(HeadlabError, match=r"no target .* is in the frequency bands 5 … 9"):
        trained.rare_loss(context)  # of this corpus' 280 tokens most are never met
    result = json.loads((one_run / "result.json").read_text())
    depth = trained.matched_depth(context)
    assert depth.figures["loss"] == result["validation"]["loss"] and depth.verdict == HOLDS
    assert depth.figures["parameters"] == result["parameters"]["total"]
    share = trained.rare_gradient(context).figures
    assert 0 <= share["rare"].mean <= 1 and share["rare"].low == share["rare"].high
