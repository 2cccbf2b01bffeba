"""The benchmark of mixtures, at a size that says nothing about speed."""

import json

import pytest

from experiments.benchmarks import mixtures


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(exit code, the table, the JSON) of one small run."""
    path = tmp_path_factory.mktemp("mixtures") / "deep" / "found.json"
    arguments = ["--size=24x4x40", "--experts=1", "--experts=3", "--rounds=2", f"--output={path}"]
    return mixtures.main(arguments), json.loads(path.read_text())


def test_every_contestant_has_its_times_ratios_and_memory(written):
    code, found = written
    assert code == 0
    assert (found["tokens"], found["d_model"], found["vocab_size"]) == (24, 4, 40)
    rows = found["contestants"]
    assert {name: row["experts"] for name, row in rows.items()} == {
        "linear": 1,
        "mixture of 1": 1,
        "mixture of 3": 3,
    }
    for row in rows.values():
        for three in (row["ms"], row["over_linear"]):
            assert len(three) == 3 and 0 < three[0] <= three[1] <= three[2]
        assert row["temporary_bytes"] > 0 and row["linear_temporary_bytes"] > 0
    assert rows["linear"]["over_linear"] == [1, 1, 1]


def test_a_size_that_is_none_is_refused(capsys):
    assert mixtures.main(["--size=24x4"]) == 2
    assert "24x4" in capsys.readouterr().err
