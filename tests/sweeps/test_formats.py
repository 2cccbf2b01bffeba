"""Promises of `headlab compare`: each format says the same, and numbers for machines are exact."""

import csv
import io
import json
import re

import pytest
from synthetic_runs import write_run

from headlab.cli import main
from headlab.cli.commands import compare as command
from headlab.sweeps import load
from headlab.sweeps.comparison import METRICS, compare
from headlab.sweeps.formats import SORTS

LOSSES = {"tied": (4 + 1 / 3, 4.1 + 1e-15), "untied": (4.2, 4.0 + 1 / 7)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for head, losses in LOSSES.items():
        for seed, loss in enumerate(losses):
            write_run(folder / f"{head}-{seed}", head=head, seed=seed, loss=loss)
    write_run(folder / "half", seed=9, steps=200, reached=100, finished=False)
    bad = write_run(folder / "bad", seed=8)
    (bad / "result.json").write_text("{")
    return folder


@pytest.fixture(scope="module")
def comparison(runs):
    with pytest.warns(UserWarning):
        return compare(load(runs), baseline="head=tied")


def output(capsys, *arguments):
    assert main(["compare", *map(str, arguments)]) == 0
    return capsys.readouterr()


def test_the_command_offers_what_the_library_has():
    assert tuple(METRICS) == command.METRICS
    assert tuple(SORTS) == command._SORTS


def test_csv_reads_back_exactly(capsys, runs, comparison):
    printed = output(capsys, runs, "--baseline=head=tied", "--format=csv")
    rows = list(csv.DictReader(io.StringIO(printed.out)))
    assert len(rows) == len(comparison.rows)
    for row, expected in zip(rows, comparison.rows, strict=True):
        assert row["group"] == expected.group.name
        assert float(row["loss"]) == expected.mean
        assert float(row["standard_error"]) == expected.standard_error
        if expected.difference is not None:
            assert float(row["difference"]) == expected.difference.mean
            assert float(row["difference_low"]) == expected.difference.low
            assert float(row["difference_high"]) == expected.difference.high
    # what is no number goes to standard error, so that the output stays a table
    assert "half" in printed.err
    assert "bad" in printed.err


def test_json_reads_back_exactly(capsys, runs, comparison):
    found = json.loads(output(capsys, runs, "--baseline=head=tied", "--format=json").out)
    assert [group["loss"] for group in found["groups"]] == [row.mean for row in comparison.rows]
    by_head = {group["values"]["head.name"]: group for group in found["groups"]}
    assert by_head["tied"]["by_seed"] == list(LOSSES["tied"])
    assert by_head["untied"]["difference"]["unmatched"] == []
    assert [run["name"] for run in found["unfinished"]] == ["half"]
    assert [run["name"] for run in found["left_out"]] == ["bad"]


def test_markdown_is_a_table_with_a_row_a_group(capsys, runs, comparison):
    text = output(capsys, runs, "--baseline=head=tied", "--format=markdown").out
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(comparison.rows)
    assert len({line.count("|") for line in lines}) == 1
    assert f"{comparison.rows[0].mean:.4f}" in lines[2]


def test_markdown_shows_text_of_runs_as_it_is(capsys, tmp_path):
    write_run(tmp_path / "<b>|x", values={"data.corpus": "text:<i>|*.txt"})
    write_run(tmp_path / "b", head="untied")
    text = output(capsys, tmp_path, "--format=markdown").out
    assert "<i>" not in text
    assert re.search(r"[^\\]\|\\\*\.txt", text) is None


def test_the_terminal_has_means_errors_intervals_and_what_is_missing(capsys, runs, comparison):
    text = output(capsys, runs, "--baseline=head=tied").out
    for row in comparison.rows:
        assert f"{row.mean:.4f} ± {row.standard_error:.4f}" in text
    difference = next(row.difference for row in comparison.rows if row.difference)
    assert f"{difference.mean:+.4f} ({difference.low:+.4f} to {difference.high:+.4f})" in text
    assert "Not finished, so not compared: half, step 100 of 200" in text
    assert "Left out: bad" in text


def test_brackets_in_names_are_no_markup(capsys, tmp_path):
    write_run(tmp_path / "a", values={"data.corpus": "text:[red]a[/red].txt"})
    write_run(tmp_path / "b", values={"data.corpus": "text:b.txt"})
    assert "[red]a[/red].txt" in output(capsys, tmp_path).out


def test_groups_can_be_listed_in_another_order(capsys, runs):
    text = output(capsys, runs, "--format=csv", "--sort=name").out
    groups = [row["group"] for row in csv.DictReader(io.StringIO(text))]
    assert groups == ["head=tied", "head=untied"]
    assert LOSSES["untied"][0] < LOSSES["tied"][0]  # the best first is the other way round


def test_output_goes_to_a_file(capsys, runs, tmp_path):
    file = tmp_path / "table.json"
    assert output(capsys, runs, "--format=json", f"--output={file}").out == ""
    assert json.loads(file.read_text())["metric"] == "loss"


def test_a_file_that_cannot_be_written_is_named(capsys, runs, tmp_path):
    assert main(["compare", str(runs), f"--output={tmp_path}/absent/table"]) == 1
    assert "absent/table could not be written" in " ".join(capsys.readouterr().err.split())
