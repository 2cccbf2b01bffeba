"""Sweeps that are committed: their runs are whole, and come to what their READMEs say."""

import json
from pathlib import Path

import pytest

from headlab.sweeps.comparison import compare
from headlab.sweeps.formats import as_json, as_markdown
from headlab.sweeps.results import collect, table

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
# an experiment of one sweep keeps it in recorded/, one of several keeps each in a folder of recorded/
FOLDERS = sorted(file.parent for file in EXPERIMENTS.glob("*/recorded/**/sweep.json"))
NAMES = [str(folder.relative_to(EXPERIMENTS)) for folder in FOLDERS]
each = pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)


@each
def test_every_point_has_been_trained_to_its_end_from_a_commit(folder):
    found = collect(folder)
    planned = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))["points"]
    assert not found.not_started and not found.left_out
    assert {run.name for run in found.runs} == {point["name"] for point in planned}
    for run in found.runs:
        assert run.result["steps"] == run.metrics[-1]["step"] == run.config["train.steps"]
        assert run.result["environment"]["git"]["dirty"] is False


@each
def test_the_comparison_and_the_readme_are_of_these_runs(folder):
    frame = table(collect(folder))
    comparison = compare(frame)
    said = as_markdown(comparison, frame)
    assert (folder / "comparison.md").read_text(encoding="utf-8") == said
    kept = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))["groups"]
    for group, now in zip(kept, json.loads(as_json(comparison, frame))["groups"], strict=True):
        for key in ("loss", "standard_error", "bits_per_byte"):
            assert group[key] == pytest.approx(now[key], rel=1e-9)
        assert (group["difference"] is None) == (now["difference"] is None)
        for key in ("mean", "low", "high") if now["difference"] else ():
            assert group["difference"][key] == pytest.approx(now["difference"][key], rel=1e-9)
    rows = [line for line in said.splitlines() if line.startswith("|")]
    experiment = folder.relative_to(EXPERIMENTS).parts[0]
    readme = (EXPERIMENTS / experiment / "README.md").read_text(encoding="utf-8")
    assert len(rows) == len(comparison.rows) + 2
    assert "\n" + "\n".join(rows) + "\n" in readme


@each
def test_it_can_be_made_again_anywhere(folder):
    command = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))["command"]
    assert command[:2] == ["headlab", "sweep"]
    values = [argument.partition("=")[2] for argument in command]
    assert not [value for value in values if Path(value).is_absolute()]
    large = [path.name for path in folder.rglob("*") if path.stat().st_size > 1e6]
    assert large in ([], ["report.html"])
    assert not large or (folder / "report.html").stat().st_size < 6e6


def test_sweeps_are_recorded():
    both = {"head_zoo/recorded/flops", "head_zoo/recorded/parameters"}
    assert both | {"tied_vs_untied/recorded"} <= {*NAMES}
