"""Promises of `load`: what a table of runs holds, and what never gets into it."""

import json
import math
import subprocess
import sys

import pytest
from synthetic_runs import write_run

from headlab.errors import UsageError
from headlab.sweeps import load
from headlab.sweeps.results import BANDS


def test_reading_results_starts_no_jax():
    code = "import sys, headlab.sweeps.results; print('jax' in sys.modules, 'flax' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]


def test_a_row_holds_what_the_files_say(tmp_path):
    path = write_run(tmp_path / "a", head="untied", seed=3, loss=4.25)
    result = json.loads((path / "result.json").read_text())
    row = load(path).iloc[0]
    assert row["name"] == "a"
    assert row["head"] == "untied"
    assert row["seed"] == 3
    assert row["state"] == "finished"
    assert row["step"] == row["steps"] == 100
    assert row["loss"] == row["last_loss"] == row["best_loss"] == 4.25
    assert row["bits_per_byte"] == result["validation"]["bits_per_byte"]
    assert row["test_loss"] == result["test"]["loss"]
    assert row["parameters"] == result["parameters"]["total"]
    assert row["parameters_head"] == result["parameters"]["head"]
    assert row["wall_seconds"] == 12.5
    assert math.isnan(row["peak_memory"])
    bands = result["validation"]["bands"]
    assert [row[band] for band in BANDS[:9]] == bands[:9]
    assert math.isnan(row[BANDS[9]])


def test_speed_is_the_median_of_the_run(tmp_path):
    path = write_run(tmp_path / "a")
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    speeds = sorted(
        line["timing/tokens_per_second"] for line in lines if "timing/tokens_per_second" in line
    )
    middle = len(speeds) // 2
    assert load(path)["tokens_per_second"][0] == (speeds[middle - 1] + speeds[middle]) / 2


@pytest.mark.parametrize("recorded", [3e9, {"host": 1e9, "device": 3e9}])
def test_peak_memory_is_read_where_it_is_recorded(tmp_path, recorded):
    path = write_run(tmp_path / "a")
    result = json.loads((path / "result.json").read_text())
    (path / "result.json").write_text(json.dumps({**result, "peak_memory": recorded}))
    assert load(path)["peak_memory"][0] == 3e9


def test_only_what_varies_has_a_column(tmp_path):
    write_run(tmp_path / "a", values={"head.softcap": None})
    write_run(tmp_path / "b", values={"head.softcap": 30.0, "model.bias": True})
    write_run(tmp_path / "c", head="low_rank", values={"head.rank": 16})
    frame = load(tmp_path)
    settings = [column for column in frame if "." in column]
    assert settings == ["head.name", "model.bias", "head.rank", "head.softcap", "head.tied"]
    # neither NaN for none, nor 1.0 for true
    assert list(frame["head.softcap"]) == [None, 30.0, None]
    assert list(frame["model.bias"]) == [False, True, False]
    assert list(frame["head.rank"]) == ["(absent)", "(absent)", 16]


def test_an_unfinished_run_is_listed_and_has_nothing_to_average(tmp_path):
    write_run(tmp_path / "a", loss=4.0)
    write_run(tmp_path / "b", loss=1.0, steps=1000, reached=450, finished=False)
    frame = load(tmp_path).set_index("name")
    assert frame.loc["b", "state"] == "unfinished"
    assert (frame.loc["b", "step"], frame.loc["b", "steps"]) == (450, 1000)
    assert frame.loc["b", "last_step"] == 450
    assert frame.loc["b", "last_loss"] == pytest.approx(1.0)
    assert frame["loss"].mean() == 4.0
    assert frame.loc["b", ["loss", "test_loss", "parameters", "band_0"]].isna().all()


def test_a_run_that_has_just_begun_is_listed(tmp_path):
    path = write_run(tmp_path / "a", finished=False)
    (path / "metrics.jsonl").unlink()
    row = load(path).iloc[0]
    assert (row["state"], row["step"]) == ("unfinished", 0)
    assert math.isnan(row["last_loss"])


DAMAGE = {
    "config.json is no JSON": ("config.json", lambda text: text[:100]),
    "config.json is no text": ("config.json", lambda text: b"\xff\xfe\xfa"),
    "config.json is of another program": ("config.json", lambda text: '{"layers": 3}'),
    "config.json is lost": ("config.json", None),
    "result.json is torn": ("result.json", lambda text: text[:200]),
    "result.json is a list": ("result.json", lambda text: "[]"),
    "result.json lacks a part": ("result.json", lambda text: text.replace('"best"', '"beast"')),
    "a loss is null": ("result.json", lambda text: text.replace('"loss": 4.0', '"loss": null')),
    "a loss is not finite": (
        "result.json",
        lambda text: text.replace('"loss": 4.0', '"loss": NaN'),
    ),
    "a loss is text": ("result.json", lambda text: text.replace('"loss": 4.0', '"loss": "4"')),
    "result.json is of another head": ("result.json", lambda t: t.replace('"tied"', '"untied"')),
    "result.json is of another seed": (
        "result.json",
        lambda t: t.replace('"seed": 0', '"seed": 1'),
    ),
    "a line of metrics is torn": ("metrics.jsonl", lambda text: text.replace('"step"', "", 1)),
    "metrics end early": ("metrics.jsonl", lambda text: text[: len(text) // 2]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_run_is_named_and_left_out(tmp_path, name):
    write_run(tmp_path / "good", loss=5.0, seed=1)
    bad = write_run(tmp_path / "bad", loss=4.0)
    file, damage = DAMAGE[name]
    if damage is None:
        (bad / file).unlink()
    else:
        content = damage((bad / file).read_text())
        assert content != (bad / file).read_text()
        (bad / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(UserWarning, match="left out .*bad"):
        frame = load(tmp_path)
    assert list(frame["name"]) == ["good"]
    [(left_out, path, reason)] = frame.attrs["left_out"]
    assert left_out == "bad"
    assert path == str(bad)
    assert reason


def test_a_failure_that_a_sweep_recorded_is_named(tmp_path):
    write_run(tmp_path / "a", finished=False, steps=200, reached=100)
    for name in ("a", "b"):
        (tmp_path / "sweep" / name).mkdir(parents=True)
        record = {"kind": "HeadlabError", "error": "the loss was not finite", "traceback": ""}
        (tmp_path / "sweep" / name / "error.json").write_text(json.dumps(record))
    points = [{"name": name, "overrides": {}} for name in ("a", "b")]
    (tmp_path / "sweep.json").write_text(json.dumps({"points": points}))
    frame = load(tmp_path)
    assert list(frame["state"]) == ["failed"]
    assert list(frame["error"]) == ["the loss was not finite"]
    assert frame.attrs["not_started"] == [
        ("b", str(tmp_path / "b"), "the loss was not finite"),
    ]


def test_other_folders_are_no_runs(tmp_path):
    write_run(tmp_path / "a")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.out").write_text("")
    assert list(load(tmp_path)["name"]) == ["a"]


def test_directories_and_single_runs_mix_and_each_run_counts_once(tmp_path):
    for seed in (10, 2):
        write_run(tmp_path / "sweep" / f"run{seed}", seed=seed)
    single = write_run(tmp_path / "single", seed=3)
    frame = load([single, tmp_path / "sweep", tmp_path / "sweep" / "run2"])
    assert list(frame["name"]) == ["single", "run2", "run10"]


def test_runs_of_one_name_are_told_apart_by_their_directories(tmp_path):
    for sweep in ("x", "y"):
        write_run(tmp_path / sweep / "a")
    assert list(load([tmp_path / "x", tmp_path / "y"])["name"]) == ["x/a", "y/a"]


def test_a_sweep_gives_the_order_and_names_what_has_not_started(tmp_path):
    for name in ("b", "a"):
        write_run(tmp_path / name, head={"a": "tied", "b": "untied"}[name])
    points = [{"name": name, "overrides": {}} for name in ("b", "a", "c")]
    sweep = {"question": None, "command": "", "baseline": {"head.name": "tied"}, "points": points}
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    frame = load(tmp_path)
    assert list(frame["name"]) == ["b", "a"]
    assert [name for name, *_ in frame.attrs["not_started"]] == ["c"]
    assert frame.attrs["baselines"] == [{"head.name": "tied"}]


@pytest.mark.parametrize("content", ["{", "[]", '{"points": [{}]}', '{"points": 3}'])
def test_a_damaged_sweep_record_is_named_and_its_runs_are_read(tmp_path, content):
    write_run(tmp_path / "a")
    (tmp_path / "sweep.json").write_text(content)
    with pytest.warns(UserWarning, match=r"sweep\.json"):
        assert list(load(tmp_path)["name"]) == ["a"]


def test_a_path_without_runs_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UsageError, match="holds none"):
            load(path)


def test_texts_and_tokenizers_are_told_apart(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", tokenizer=2)
    write_run(tmp_path / "c", documents=60)
    frame = load(tmp_path).set_index("name")
    assert frame.loc["a", "text"] == frame.loc["b", "text"] != frame.loc["c", "text"]
    assert frame["tokenizer"].nunique() == 3
