"""Audits against direct comparisons: exact where nothing is rounded, and each kind of difference where it is made."""

import jax
import numpy as np
import pytest
from flax import nnx

from headlab import heads
from headlab.analysis.audits import Variant, compare_heads_numerically, self_repetition
from headlab.analysis.geometry import head_gradient_share
from headlab.errors import UsageError


@pytest.fixture(scope="module")
def head():
    return heads.build(
        "untied", vocab_size=90, d_model=16, rngs=nnx.Rngs(0), vocab_multiple=8, init_scale=1.0
    )


@pytest.fixture(scope="module")
def audits(head):
    h = np.random.default_rng(0).standard_normal((400, 16)).astype(np.float32)
    variants = {
        "float32": Variant(),
        "blocks": Variant(block_rows=7),
        "shards": Variant(shards=4),
        "bfloat16": Variant(states="bfloat16", logits="bfloat16"),
    }
    return h, compare_heads_numerically(h, head, variants, near_tie=0.02)


def test_float32_blocks_and_shards_differ_by_rounding_alone(audits):
    _, found = audits
    for name in ("float32", "blocks", "shards"):
        # sums of 16 products and an exponential sum of 90, each number below 8
        assert 0 < found[name].largest < 8 * (16 + 8) * np.finfo(np.float32).eps
        assert found[name].mean <= found[name].largest and found[name].flips == 0


def test_bfloat16_flips_near_ties_and_is_compared_with_float64(head, audits):
    h, found = audits
    audit = found["bfloat16"]
    exact = head.log_probs(h, dtype=np.float64)
    top = np.sort(exact, axis=1)[:, -2:]
    assert audit.near_ties == np.sum(top[:, 1] - top[:, 0] <= 0.02) > 0
    assert 0 < audit.near_tie_flips <= audit.flips < 40 and audit.positions == 400
    assert 1e-3 < audit.largest < 0.2 and audit.largest_share_change < 0.05


def test_the_two_way_choice_counts_what_crosses_the_threshold(head):
    h = np.random.default_rng(1).standard_normal((400, 16)).astype(np.float32)
    exact = head.log_probs(h, dtype=np.float64)
    share = 1 / (1 + np.exp(exact[:, 5] - exact[:, 3]))
    threshold = float(np.median(share))
    coarse = {"coarse": Variant(states="bfloat16")}
    found = compare_heads_numerically(h, head, coarse, choice=(3, 5), threshold=threshold)["coarse"]
    import ml_dtypes

    rounded = h.astype(ml_dtypes.bfloat16).astype(np.float64)
    near = rounded @ np.asarray(head.weight[...]).astype(ml_dtypes.bfloat16).astype(np.float64).T
    changed = 1 / (1 + np.exp(near[:, 5] - near[:, 3]))
    assert found.choices_changed == np.sum((changed > threshold) != (share > threshold))
    assert found.choice == (3, 5)


def test_every_head_can_be_audited_on_shards():
    special = {"tied": {}, "adaptive": dict(cutoffs=(10,), div_value=2.0)}
    for name, options in special.items():
        given = dict(vocab_size=30, d_model=8, vocab_multiple=8, init_scale=1.0, **options)
        own = heads.build(name, rngs=nnx.Rngs(0), **given)
        table = heads.get(name).input_embedding(rngs=nnx.Rngs(0), **given)
        # as a checkpoint gives them: on one device for good
        table = jax.tree.map(lambda a: jax.device_put(a, jax.devices()[0]), table)
        h = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
        found = compare_heads_numerically(h, own, {"two": Variant(shards=2)}, embedding=table)
        assert found["two"].largest < 1e-4


def test_self_repetition_is_the_mean_probability_of_the_same_token(head):
    h = np.random.default_rng(0).standard_normal((6, 16)).astype(np.float32)
    inputs, targets = np.array([1, 2, 3, 4, 5, 6]), np.array([1, 9, 3, 9, 9, 9])
    found = self_repetition(head, h, inputs, targets)
    exact = np.exp(head.log_probs(h, dtype=np.float64))[np.arange(6), inputs].mean()
    assert found.mass == pytest.approx(exact, rel=1e-5) and found.rate == pytest.approx(1 / 3)
    assert found.excess == found.mass - found.rate


@pytest.mark.parametrize(
    ("inputs", "targets", "said"),
    [
        ([1, 2], [1, -1], r"targets has -1 at position 1; ids must be in \[0, 90\)"),
        ([90, 2], [1, 1], "inputs has 90 at position 0"),
        ([1, 2, 3], [1, 1], "3 inputs and 2 positions"),
        ([1.0, 2.0], [1, 1], "inputs are of dtype float64"),
    ],
)
def test_ids_of_another_vocabulary_or_number_are_refused(head, inputs, targets, said):
    with pytest.raises(UsageError, match=said):
        self_repetition(head, np.ones((2, 16), np.float32), inputs, targets)
    if said.startswith("targets"):
        with pytest.raises(UsageError, match=said):
            head_gradient_share(head, np.ones((2, 16), np.float32), targets)


@pytest.mark.parametrize(
    ("variant", "options", "said"),
    [
        (Variant(shards=5), {}, "must divide the 96 rows"),
        (Variant(logits="float16"), {}, "'float32' or 'bfloat16'"),
        (Variant(block_rows=0), {}, "block_rows is 0"),
        (Variant(), dict(choice=(1, 1)), "two different ids"),
        (Variant(), dict(threshold=1.0), "threshold is 1.0"),
        (Variant(), dict(near_tie=-1.0), "near_tie is -1.0"),
    ],
)
def test_what_cannot_be_audited_is_refused(head, variant, options, said):
    with pytest.raises(UsageError, match=said):
        compare_heads_numerically(np.ones((2, 16), np.float32), head, {"it": variant}, **options)
