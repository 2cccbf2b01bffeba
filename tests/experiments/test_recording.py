"""Recorded sweeps: what is kept reads as the sweep does, and what nobody could make again is refused."""

import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
from synthetic_runs import write_run

from experiments import recording
from headlab import heads, sweeps
from headlab.sweeps.comparison import compare
from headlab.sweeps.page import write_report
from headlab.sweeps.results import collect

LOSSES = {"tied": (4.0, 4.1, 4.2), "untied": (3.9, 4.05, 4.08), "low_rank": (4.3, 4.4, 4.5)}


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """A finished sweep of three heads and three seeds, with what is not to be kept."""
    monkeypatch.setattr(
        recording,
        "samples",
        lambda runs: [
            {"head": head, "prompt": "So", "text": path.name} for head, path in runs.items()
        ],
    )
    folder, points = tmp_path / "sweep", []
    for head, losses in LOSSES.items():
        for seed, loss in enumerate(losses):
            name = f"head={head},seed={seed}"
            run = write_run(folder / name, head=head, seed=seed, loss=loss)
            (run / "tokenizer.json").write_text("{}")
            (run / "checkpoints" / "100").mkdir(parents=True)
            points.append({"name": name})
    content = {"question": "Which?", "baseline": {"head.name": "tied"}, "points": points}
    content["command"] = ["headlab", "sweep", "--workdir=runs/sweep"]
    (folder / "sweep.json").write_text(json.dumps(content))
    return folder


def test_the_folder_reads_as_the_sweep_itself(sweep, tmp_path):
    written = recording.record(sweep, tmp_path / "kept" / "here")
    folder = tmp_path / "kept" / "here"
    assert {path.name for path in written} == {
        "comparison.json",
        "comparison.md",
        "losses.png",
        "report.html",
        "samples.json",
        "sweep.json",
    }
    before, after = sweeps.load(sweep), sweeps.load(folder)
    pd.testing.assert_frame_equal(after.drop(columns="path"), before.drop(columns="path"))
    assert [run.metrics for run in collect(folder).runs] == [r.metrics for r in collect(sweep).runs]
    difference = json.loads((folder / "comparison.json").read_text())["groups"][0]["difference"]
    expected = compare(before).rows[0].difference
    assert (difference["mean"], difference["low"]) == (expected.mean, expected.low)
    assert difference["baseline"] == "head=tied"
    page = (folder / "report.html").read_text()
    assert "Which?" in page and "runs/sweep" in page and "So" in page
    assert f"{expected.mean:+.4f}".replace("-", "−") in page.replace("-", "−")


def test_without_the_page_the_rest_makes_it(sweep, tmp_path, capsys):
    whole, folder = tmp_path / "whole", tmp_path / "kept"
    recording.record(sweep, whole)
    assert recording.main([str(sweep), str(folder), "--no-page"]) == 0
    names = {path.name for path in whole.iterdir()} - {"report.html"}
    assert {path.name for path in folder.iterdir()} == names
    said = {path.name for path in map(Path, capsys.readouterr().out.split())}
    assert said == {path.name for path in folder.iterdir() if path.is_file()}
    write_report(folder, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Which?" in page and "So" in page and "head=low_rank" in page


def test_checkpoints_logs_and_the_places_of_this_machine_are_not_kept(sweep, tmp_path):
    recording.record(sweep, tmp_path / "kept")
    files = [path for path in (tmp_path / "kept").rglob("*") if path.is_file()]
    kept = {path.name for path in files if path.parent != tmp_path / "kept"}
    assert kept == set(recording.KEPT)
    texts = [path for path in files if path.suffix != ".png"]
    assert not [path for path in texts if str(tmp_path) in path.read_text()]
    assert not list(tmp_path.glob(".*"))  # nothing half made


def test_the_figure_has_the_mean_of_each_group_and_each_paired_difference(sweep):
    comparison = compare(sweeps.load(sweep))
    losses, differences = recording.draw(comparison, collect(sweep).runs).axes
    legend = [text.get_text() for text in losses.get_legend().get_texts()]
    assert legend == ["untied", "tied", "low_rank"]
    ends = {line.get_label(): line.get_ydata()[-1] for line in losses.lines}
    assert ends == {head: pytest.approx(sum(own) / 3, abs=1e-12) for head, own in LOSSES.items()}
    assert "mean of 3 seeds" in losses.get_ylabel() and "nats per token" in losses.get_ylabel()
    assert [label.get_text() for label in differences.get_yticklabels()] == ["untied", "low_rank"]
    marks, interval, mean = differences.lines[1:4]  # after the rule at 0
    assert list(marks.get_xdata()) == pytest.approx([-0.1, -0.05, -0.12])
    untied = comparison.rows[0].difference
    assert list(interval.get_xdata()) == [untied.low, untied.high]
    assert list(mean.get_xdata()) == [untied.mean]
    assert "difference to tied" in differences.get_xlabel()
    colours = {line.get_label(): line.get_color() for line in losses.lines}
    assert len(set(colours.values())) == 3
    assert mean.get_color() == colours["untied"]


def test_groups_of_one_head_are_told_apart_by_what_varies(tmp_path):
    for width in (100, 200):
        write_run(tmp_path / str(width), loss=4 + width / 1000, values={"model.d_mlp": width})
    comparison = compare(sweeps.load(tmp_path))
    losses, differences = recording.draw(comparison, collect(tmp_path).runs).axes
    legend = [text.get_text() for text in losses.get_legend().get_texts()]
    assert legend == [row.group.name for row in comparison.rows]
    assert len(set(legend)) == 2 and len({line.get_color() for line in losses.lines}) == 2
    (mean,) = differences.lines[2:]  # one seed: no interval
    assert list(mean.get_xdata()) == [pytest.approx(0.1)]


@pytest.mark.parametrize("groups", [2, 9])
def test_a_legend_of_many_groups_covers_no_curve(tmp_path, groups):
    for head in heads.names()[:groups]:
        write_run(tmp_path / head, head=head, loss=4 + len(head) / 10)
    comparison = compare(sweeps.load(tmp_path))
    figure = recording.draw(comparison, collect(tmp_path).runs)
    figure.draw_without_rendering()
    losses = figure.axes[0]
    legend = losses.get_legend()
    assert len(legend.get_texts()) == groups
    inside = losses.get_window_extent().overlaps(legend.get_window_extent())
    assert inside == (groups == 2)
    assert legend.get_window_extent().x1 <= figure.bbox.x1


def test_what_has_finished_is_recorded_and_a_copy_of_it_recorded_on(sweep, tmp_path, capsys):
    """Samples need checkpoints, which a copy has not: those that were recorded are kept."""
    for head in LOSSES:
        shutil.rmtree(sweep / f"head={head},seed=2")
    shutil.rmtree(sweep / "head=untied,seed=0")
    (sweep / "head=untied,seed=1" / "result.json").rename(tmp_path / "result.json")
    part = tmp_path / "part"
    assert recording.main([str(sweep), str(part)]) == 2
    assert "--so-far" in capsys.readouterr().err
    assert recording.main([str(sweep), str(part), "--so-far"]) == 0
    frame = sweeps.load(part)
    assert sorted(frame["name"]) == [
        f"head={head},seed={seed}" for head in ("low_rank", "tied") for seed in (0, 1)
    ]
    assert {name for name, *_ in frame.attrs["not_started"]} == {
        *(f"head={head},seed=2" for head in LOSSES),
        *(f"head=untied,seed={seed}" for seed in (0, 1)),
    }
    samples = json.loads((part / "samples.json").read_text())
    assert {sample["head"]: sample["text"] for sample in samples} == {
        f"head={head}": f"head={head},seed=0" for head in ("tied", "low_rank")
    }
    for seed, loss in enumerate(LOSSES["untied"]):
        run = write_run(part / f"head=untied,seed={seed}", head="untied", seed=seed, loss=loss)
        (run / "checkpoints" / "100").mkdir(parents=True)
    write_run(part / "head=tied,seed=2", head="tied", seed=2)
    write_run(part / "head=low_rank,seed=2", head="low_rank", seed=2)
    recording.record(part, tmp_path / "whole")
    assert len(sweeps.load(tmp_path / "whole")) == 9
    after = json.loads((tmp_path / "whole" / "samples.json").read_text())
    untied = {"head": "head=untied", "prompt": "So", "text": "head=untied,seed=0"}
    assert after == [*samples, untied]
    (part / "samples.json").unlink()
    assert recording.main([str(part), str(tmp_path / "again")]) == 2
    assert "tied,seed=0: no checkpoints" in " ".join(capsys.readouterr().err.split())


def _unfinished(sweep):
    (sweep / "head=tied,seed=1" / "result.json").unlink()


def _damaged(sweep):
    (sweep / "head=tied,seed=1" / "result.json").write_text("{")


def _not_started(sweep):
    content = json.loads((sweep / "sweep.json").read_text())
    content["points"].append({"name": "head=tied,seed=3"})
    (sweep / "sweep.json").write_text(json.dumps(content))


def _of_git(git):
    def change(sweep):
        path = sweep / "head=tied,seed=1" / "result.json"
        result = json.loads(path.read_text())
        result["environment"]["git"] = git
        path.write_text(json.dumps(result))

    return change


def _no_sweep(sweep):
    (sweep / "sweep.json").unlink()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_unfinished, r"1 of the points of \S+ cannot be recorded.*head=tied,seed=1\. Run"),
        (_damaged, r"1 of the points of \S+ cannot be recorded.*head=tied,seed=1\. Run"),
        (_not_started, r"1 of the points of \S+ cannot be recorded.*head=tied,seed=3\. Run"),
        (_of_git({"commit": "ab", "dirty": True}), r"seed=1 was .* differed from its commit"),
        (_of_git(None), r"head=tied,seed=1 was .* is in no git repository"),
        (_no_sweep, r"is no sweep: there is no sweep\.json"),
    ],
)
def test_what_could_not_be_made_again_is_refused_by_name(sweep, tmp_path, capsys, change, said):
    change(sweep)
    assert recording.main([str(sweep), str(tmp_path / "kept")]) == 2
    assert re.search(said, " ".join(capsys.readouterr().err.split()))
    assert not (tmp_path / "kept").exists()


def test_a_folder_with_something_in_it_is_left_as_it_is(sweep, tmp_path, capsys):
    before = sorted(sweep.rglob("*"))
    assert recording.main([str(sweep), str(sweep)]) == 2
    assert "is there already and not empty" in " ".join(capsys.readouterr().err.split())
    assert sorted(sweep.rglob("*")) == before
    (tmp_path / "empty").mkdir()
    assert recording.main([str(sweep), str(tmp_path / "empty")]) == 0
    assert str(tmp_path / "empty" / "report.html") in capsys.readouterr().out


def test_a_failure_on_the_way_leaves_no_half_made_folder(sweep, tmp_path, monkeypatch):
    def fail(runs):
        raise RuntimeError("no samples")

    monkeypatch.setattr(recording, "samples", fail)
    with pytest.raises(RuntimeError, match="no samples"):
        recording.record(sweep, tmp_path / "kept")
    assert [path.name for path in tmp_path.iterdir()] == ["sweep"]
