"""Sweep files: found, checked as a whole, and refused with the fix named."""

import os
from pathlib import Path

import pytest

from headlab import sweeps
from headlab.errors import UsageError

SEEDS = 'values("seed", range(2))'


def test_every_point_has_a_name_and_a_resolved_config(sweep_file):
    loaded = sweeps.plan(sweep_file(f'product(values("head.name", ["tied", "untied"]), {SEEDS})'))
    assert [point.name for point in loaded.points] == [
        "head=tied,seed=0",
        "head=tied,seed=1",
        "head=untied,seed=0",
        "head=untied,seed=1",
    ]
    assert [(p.config.head.name, p.config.seed) for p in loaded.points][2] == ("untied", 0)
    assert all(p.config.model.d_model == 16 for p in loaded.points)  # shared by all
    assert loaded.keys == ["head.name", "seed"]


def test_overrides_of_the_command_line_apply_to_every_point(sweep_file):
    loaded = sweeps.plan(sweep_file(SEEDS), [("train.steps", "15")])
    assert [point.config.train.steps for point in loaded.points] == [15, 15]


def test_points_may_depend_on_the_base_with_its_overrides(sweep_file):
    path = sweep_file('lambda base: values("model.d_mlp", [base.model.d_model * 3])')
    (point,) = sweeps.plan(path, [("model.d_model", "8")]).points
    assert point.config.model.d_mlp == 24


def test_the_base_is_found_beside_or_above_the_sweep_file_from_any_directory(
    sweep_file, tmp_path, monkeypatch
):
    path = Path(sweep_file(SEEDS))
    tiny = Path("configs/tiny.py").read_text()
    (tmp_path / "deeper").mkdir()
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.py").write_text(tiny)
    moved = path.rename(tmp_path / "deeper" / path.name)
    monkeypatch.chdir(os.sep)
    assert len(sweeps.plan(str(moved)).points) == 2


@pytest.mark.parametrize(
    ("points", "overrides", "message"),
    [
        (
            'values("trian.steps", [1])',
            (),
            r"point steps=1: trian\.steps.*did you mean train\.steps",
        ),
        ('values("train.steps", ["many"])', (), r"point steps=many: train\.steps='many'.*integer"),
        ('values("model.n_heads", [3])', (), r"point n_heads=3: model\.n_heads=3 does not divide"),
        ('values("seed", [])', (), r"has no points"),
        ('values("seed", [1, 1])', (), r"two points have the name seed=1"),
        (
            'points({"seed": 0}, {"seed": 0, "train.steps": 12})',
            (),
            r"seed=0 and steps=12,seed=0|seed=0 and seed=0,steps=12 have the same configuration",
        ),
        ('values("seed", [0, 1])', [("seed", "3")], r"--config\.seed=3 is for every point"),
        ('values("seed", [0, 1])', [("sed", "3")], r"sed is not an option; did you mean seed"),
        ('zip(values("seed", [0]), values("train.steps", []))', (), r"1, 0 of them"),
        ("1 / 0", (), r"failed at line \d+: ZeroDivisionError"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_with_the_fix(sweep_file, points, overrides, message):
    with pytest.raises(UsageError, match=message):
        sweeps.plan(sweep_file(points), overrides)


def test_a_baseline_that_no_point_is_is_refused(sweep_file):
    with pytest.raises(UsageError, match=r"no point of the sweep is its baseline"):
        sweeps.plan(sweep_file(SEEDS, baseline={"head.name": "tied"}))


def test_files_that_define_no_sweep_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read the sweep file"):
        sweeps.plan(tmp_path / "none.py")
    with pytest.raises(UsageError, match=r"tiny\.py has no function get_sweep\(\)"):
        sweeps.plan("configs/tiny.py")
    other = tmp_path / "other.py"
    other.write_text("def get_sweep():\n    return 3\n")
    with pytest.raises(UsageError, match=r"returned int, not a Sweep"):
        sweeps.plan(other)
    other.write_text(
        "from headlab.sweeps import *\ndef get_sweep():\n"
        '    return Sweep(base="configs/none.py", points=values("seed", [0]), question="")\n'
    )
    with pytest.raises(UsageError, match=r"base config configs/none\.py"):
        sweeps.plan(other)


def test_an_unknown_word_after_the_file_names_the_nearest():
    with pytest.raises(UsageError, match=r"no variant 'tinny'; did you mean 'tiny'"):
        sweeps.plan("configs/sweeps/tied_vs_untied.py:tinny")
