"""Promises of a comparison: its statistics are those of SciPy, and it pairs only what is comparable."""

import json

import numpy as np
import pytest
from scipy import stats
from synthetic_runs import write_run

from headlab.errors import UsageError
from headlab.sweeps import load
from headlab.sweeps.comparison import compare, mean_and_error, paired_difference

TIED = {0: 4.01, 1: 4.05, 2: 3.98, 3: 4.00}
UNTIED = {0: 4.04, 1: 4.07, 2: 4.03, 3: 4.02}


def write_groups(folder, **groups):
    """Runs of each head with these losses by seed."""
    for head, losses in groups.items():
        for seed, loss in losses.items():
            write_run(folder / f"{head}-{seed}", head=head, seed=seed, loss=loss)
    return folder


def rows_of(comparison):
    return {row.group.name: row for row in comparison.rows}


@pytest.mark.parametrize("n", [2, 3, 10, 60])
def test_the_interval_is_that_of_the_paired_t_test(n):
    rng = np.random.default_rng(n)
    a, b = rng.normal(4, 0.1, n), rng.normal(4.1, 0.1, n)
    mean, low, high = paired_difference(dict(enumerate(a)), dict(enumerate(b)))
    interval = stats.ttest_rel(a, b).confidence_interval(0.95)
    # both round at each of n additions and in the quantile: 1e-10 is far above, and far below use
    np.testing.assert_allclose([low, high], [interval.low, interval.high], rtol=1e-10)
    np.testing.assert_allclose(mean, np.mean(a - b), rtol=1e-12)


def test_the_standard_error_is_that_of_scipy():
    values = np.random.default_rng(0).normal(size=7)
    mean, error = mean_and_error(values)
    np.testing.assert_allclose([mean, error], [values.mean(), stats.sem(values)], rtol=1e-12)


def test_groups_are_averaged_over_seeds_and_paired_by_seed(tmp_path):
    frame = load(write_groups(tmp_path, tied=TIED, untied=UNTIED))
    comparison = compare(frame, baseline="head=tied")
    assert [row.group.name for row in comparison.rows] == ["head=tied", "head=untied"]
    untied = rows_of(comparison)["head=untied"]
    assert untied.n == 4
    np.testing.assert_allclose(untied.mean, np.mean(list(UNTIED.values())), rtol=1e-12)
    np.testing.assert_allclose(untied.standard_error, stats.sem(list(UNTIED.values())), rtol=1e-12)
    interval = stats.ttest_rel(list(UNTIED.values()), list(TIED.values())).confidence_interval()
    found = untied.difference
    np.testing.assert_allclose([found.low, found.high], interval, rtol=1e-10)
    assert found.baseline == "head=tied"
    assert rows_of(comparison)["head=tied"].difference is None


def test_seeds_are_paired_by_their_number_not_by_their_order(tmp_path):
    losses = {3: 4.30, 1: 4.10, 2: 4.20}
    write_groups(tmp_path, tied=dict(sorted(losses.items())))
    for seed, loss in losses.items():
        write_run(tmp_path / f"{9 - seed}", head="untied", seed=seed, loss=loss + 0.01)
    found = rows_of(compare(load(tmp_path), baseline="head=tied"))["head=untied"].difference
    assert sorted(found.by_seed) == [1, 2, 3]
    np.testing.assert_allclose(list(found.by_seed.values()), 0.01, atol=1e-12)


def test_a_seed_without_a_partner_is_named_and_left_out(tmp_path):
    frame = load(write_groups(tmp_path, tied=TIED, untied={0: 4.04, 1: 4.07, 9: 1.0}))
    comparison = compare(frame, baseline="head=tied")
    found = rows_of(comparison)["head=untied"].difference
    assert sorted(found.by_seed) == [0, 1]
    np.testing.assert_allclose(found.mean, 0.025, rtol=1e-9)
    assert found.unmatched == ["head=untied, seed 9", "head=tied, seed 2", "head=tied, seed 3"]
    assert any("head=untied, seed 9" in note for note in comparison.notes)


def test_one_pair_has_no_interval_and_says_so(tmp_path):
    comparison = compare(load(write_groups(tmp_path, tied={0: 4.0}, untied={0: 4.1})))
    row = rows_of(comparison)["head=untied"]
    assert (row.standard_error, row.difference.low, row.difference.high) == (None, None, None)
    assert any("no interval" in note for note in comparison.notes)


def test_no_seed_in_common_is_no_difference(tmp_path):
    comparison = compare(load(write_groups(tmp_path, tied={0: 4.0}, untied={1: 4.1})))
    row = rows_of(comparison)["head=untied"]
    assert row.difference is None
    assert "no seed in common" in row.why_none


def test_unfinished_runs_are_never_averaged(tmp_path):
    write_groups(tmp_path, tied=TIED)
    write_run(tmp_path / "more", seed=5, loss=1.0, steps=200, reached=190, finished=False)
    [row] = compare(load(tmp_path)).rows
    assert row.n == 4
    np.testing.assert_allclose(row.mean, np.mean(list(TIED.values())), rtol=1e-12)


def test_a_run_given_twice_under_two_names_is_refused(tmp_path):
    write_groups(tmp_path, tied=TIED)
    write_run(tmp_path / "copy", seed=0, loss=4.01)
    with pytest.raises(UsageError, match=r"copy.*one configuration and one seed, 0"):
        compare(load(tmp_path))


def test_keys_pair_each_group_with_the_baseline_of_its_other_values(tmp_path):
    for width, loss in ((64, 5.0), (128, 4.0)):
        for head, more in (("tied", 0.0), ("untied", 0.1)):
            write_run(
                tmp_path / f"{head}-{width}",
                head=head,
                loss=loss + more,
                values={"model.d_model": width},
            )
    write_run(tmp_path / "wide", head="untied", loss=3.0, values={"model.d_model": 256})
    rows = rows_of(compare(load(tmp_path), baseline={"head": "tied"}))
    for width in (64, 128):
        found = rows[f"head=untied, d_model={width}"].difference
        assert found.baseline == f"head=tied, d_model={width}"
        assert found.mean == pytest.approx(0.1)
    assert rows["head=untied, d_model=256"].difference is None
    assert rows["head=untied, d_model=256"].why_none == "there is no baseline with d_model=256"


def test_an_option_that_the_baseline_has_not_is_no_obstacle(tmp_path):
    write_run(tmp_path / "tied", loss=4.0)
    for experts in (2, 4):
        values = {"head.n_experts": experts}
        write_run(tmp_path / f"k{experts}", head="mixture_of_softmaxes", loss=3.9, values=values)
    rows = rows_of(compare(load(tmp_path), baseline="head.name=tied"))
    assert list(rows) == [
        "head=mixture_of_softmaxes, n_experts=2",
        "head=mixture_of_softmaxes, n_experts=4",
        "head=tied",
    ]
    assert rows["head=mixture_of_softmaxes, n_experts=4"].difference.baseline == "head=tied"


@pytest.mark.parametrize(
    ("baseline", "why"),
    [
        ("head=united", "none of the groups.*head=tied; head=untied"),
        ("rank=3", "rank does not differ.*head.name"),
        ("nobody", "neither KEY=VALUE nor the name"),
        ("unfinished", "has not finished"),
    ],
)
def test_a_baseline_that_is_not_there_is_refused(tmp_path, baseline, why):
    write_groups(tmp_path, tied=TIED, untied=UNTIED)
    write_run(tmp_path / "unfinished", head="untied", seed=7, finished=False)
    with pytest.raises(UsageError, match=why):
        compare(load(tmp_path), baseline=baseline)


def test_a_baseline_that_could_be_two_groups_is_refused(tmp_path):
    for experts in (2, 4):
        values = {"head.n_experts": experts}
        write_run(tmp_path / f"k{experts}", head="mixture_of_softmaxes", values=values)
    write_run(tmp_path / "tied")
    with pytest.raises(UsageError, match="could be .*give more keys"):
        compare(load(tmp_path), baseline="head=mixture_of_softmaxes")


def test_a_run_or_a_group_can_be_the_baseline_by_name(tmp_path):
    frame = load(write_groups(tmp_path, tied=TIED, untied=UNTIED))
    for name in ("untied-2", "head=untied"):
        found = rows_of(compare(frame, baseline=name))["head=tied"].difference
        assert found.baseline == "head=untied"


def test_the_baseline_of_the_sweep_is_the_default(tmp_path):
    write_groups(tmp_path, tied=TIED, untied=UNTIED)
    sweep = {"baseline": {"head.name": "untied"}, "points": []}
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    assert rows_of(compare(load(tmp_path)))["head=tied"].difference.baseline == "head=untied"
    assert compare(load(tmp_path), baseline="head=tied").rows[1].difference.baseline == "head=tied"


def test_an_unusable_baseline_of_the_sweep_is_named(tmp_path):
    write_groups(tmp_path, tied=TIED, untied=UNTIED)
    sweep = {"baseline": {"head.name": "adaptive"}, "points": []}
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    assert any("adaptive" in note for note in compare(load(tmp_path)).notes)


def test_values_are_told_apart_by_type_and_numbers_compared_as_numbers(tmp_path):
    for rate in (0.001, 0.002):
        write_run(tmp_path / f"r{rate}", loss=4 + rate, values={"optimizer.peak_rate": rate})
    rows = rows_of(compare(load(tmp_path), baseline="peak_rate=1e-3"))
    assert rows["peak_rate=0.002"].difference.baseline == "peak_rate=0.001"


def test_how_a_run_was_carried_out_makes_no_group(tmp_path):
    write_run(tmp_path / "a", seed=0, log_every=10)
    write_run(tmp_path / "b", seed=1, log_every=5)
    [row] = compare(load(tmp_path)).rows
    assert row.n == 2


def test_tokenizers_are_compared_in_bits_per_byte_and_never_in_nats(tmp_path):
    write_run(tmp_path / "a", loss=4.0)
    write_run(tmp_path / "b", head="untied", loss=7.0, tokenizer=2)
    frame = load(tmp_path)
    comparison = compare(frame)
    assert comparison.metric.column == "bits_per_byte"
    assert any("2 tokenizers" in note for note in comparison.notes)
    assert rows_of(comparison)["head=untied"].difference.mean == pytest.approx(7 / 6 - 4 / 3)
    for metric in ("loss", "test_loss", "best_loss", "train_loss"):
        with pytest.raises(UsageError, match="2 tokenizers.*bits_per_byte"):
            compare(frame, metric=metric)


def test_runs_of_two_tokenizers_are_no_repetitions_of_each_other(tmp_path):
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, tokenizer=2)
    assert [row.n for row in compare(load(tmp_path)).rows] == [1, 1]


def test_there_is_no_difference_between_texts(tmp_path):
    write_run(tmp_path / "a", loss=4.0)
    write_run(tmp_path / "b", head="untied", loss=4.1, documents=60)
    frame = load(tmp_path)
    comparison = compare(frame)
    assert comparison.metric.column == "bits_per_byte"
    assert [row.difference for row in comparison.rows] == [None, None]
    assert any("2 held-out texts" in note for note in comparison.notes)
    with pytest.raises(UsageError, match="2 held-out texts"):
        compare(frame, metric="loss")


def test_the_best_comes_first(tmp_path):
    frame = load(write_groups(tmp_path, tied={0: 4.2}, untied={0: 4.1}))
    assert [row.group.name for row in compare(frame).rows] == ["head=untied", "head=tied"]


def test_an_unknown_metric_is_refused_with_those_that_are(tmp_path):
    frame = load(write_run(tmp_path / "a"))
    with pytest.raises(UsageError, match="'accuracy'.*bits_per_byte"):
        compare(frame, metric="accuracy")


def test_without_finished_runs_there_is_nothing_to_compare(tmp_path):
    write_run(tmp_path / "a", steps=100, reached=40, finished=False)
    with pytest.raises(UsageError, match="no run has finished.*a is at step 40 of 100"):
        compare(load(tmp_path))
