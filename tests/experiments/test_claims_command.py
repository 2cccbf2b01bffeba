"""The command of the claims: it goes on where it was stopped, and its table is that of what it recorded."""

import json
import types

import pytest

from experiments.claims import (
    arithmetic,
    choices,
    findings,
    numerics,
    register,
    run,
    runs,
    scale,
    table,
    trained,
)
from experiments.claims.findings import HOLDS, Finding
from headlab import files
from headlab.errors import HeadlabError


@pytest.fixture
def fakes(monkeypatch):
    """Two claims whose measures are counted; the second fails when told to."""
    calls, broken = [], []

    def claim(name):
        return register.Claim(
            name, f"{name} is so", "nobody 2026", "tiny", "never", f"fakes.{name}", 1
        )

    monkeypatch.setattr(register, "CLAIMS", (claim("first"), claim("second")))
    monkeypatch.setattr(table, "CLAIMS", register.CLAIMS)
    monkeypatch.setattr(run, "CLAIMS", register.CLAIMS)

    def measured(claim, context):
        if claim.name in broken:
            raise HeadlabError("stopped here")
        calls.append(claim.name)
        return Finding({"n": len(calls)}, HOLDS, f"found {len(calls)}")

    monkeypatch.setattr(run, "measured", measured)
    return types.SimpleNamespace(calls=calls, broken=broken)


def test_what_was_tested_is_kept_and_the_same_command_goes_on(fakes, tmp_path, capsys, monkeypatch):
    command = [f"--workdir={tmp_path}"]
    fakes.broken.append("second")
    assert run.main(command) == 1
    fakes.broken.clear()
    assert run.main(command) == run.main(command) == 0
    assert fakes.calls == ["first", "second"]
    found = json.loads((tmp_path / "claims.json").read_text())
    assert found["claims"]["second"]["found"] == "found 2"
    assert found["environment"]["versions"]["jax"] and found["seeds"] == [0, 1, 2]
    text = (tmp_path / "claims.md").read_text()
    assert "| first is so | nobody 2026 | `python -m experiments.claims.run first` |" in text
    assert text.count("**holds**") == 2
    assert run.main([*command, "second"]) == 0 and fakes.calls == ["first", "second"]
    assert len(json.loads((tmp_path / "claims.json").read_text())["claims"]) == 2  # the first, too
    monkeypatch.setattr(run, "_kept", lambda *_: None)  # as at another commit
    assert run.main([*command, "second"]) == 0 and fakes.calls == ["first", "second", "second"]
    assert "second: holds" in capsys.readouterr().err


def test_what_was_found_at_another_commit_is_not_kept(tmp_path):
    files.write_json(run._path(tmp_path, "rank"), {"commit": "a", "verdict": HOLDS})
    assert run._kept(tmp_path, "rank", "a")["verdict"] == HOLDS
    assert run._kept(tmp_path, "rank", "b") is None
    run._path(tmp_path, "rank").write_text('{"commit":')
    assert run._kept(tmp_path, "rank", "a") is None


def test_an_unknown_claim_is_refused_with_the_nearest_before_anything_starts(tmp_path, capsys):
    assert run.main(["pading", f"--workdir={tmp_path}/new"]) == 2
    assert "did you mean padding?" in " ".join(capsys.readouterr().err.split())
    assert run.main(["rank", "--record", f"--workdir={tmp_path}/new"]) == 2
    assert "leave the names of claims away" in " ".join(capsys.readouterr().err.split())
    assert not any(tmp_path.iterdir())


def test_every_claim_is_listed_and_its_measure_exists(capsys):
    assert run.main(["--list"]) == 0
    shown = capsys.readouterr().out
    modules = {
        m.__name__.rpartition(".")[2]: m for m in (arithmetic, choices, numerics, scale, trained)
    }
    for claim in register.CLAIMS:
        assert claim.name in shown and "|" not in claim.says + claim.rule + claim.size
        module, function = claim.measure.split(".")
        assert callable(getattr(modules[module], function))
    assert len({claim.name for claim in register.CLAIMS}) == len(register.CLAIMS)


def test_a_table_replaces_the_one_between_the_markers(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    table.put_into(readme, "| new |\n")
    assert readme.read_text() == f"before\n{table.BEGIN}\n| new |\n{table.END}\nafter\n"
    readme.write_text("no table")
    with pytest.raises(HeadlabError, match="has no table to replace"):
        table.put_into(readme, "| new |\n")


def test_the_readmes_table_is_that_of_the_record():
    folder = runs.ROOT / "experiments" / "claims"
    recorded = json.loads((folder / "recorded" / "claims.json").read_text(encoding="utf-8"))
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert f"{table.BEGIN}\n{table.markdown(recorded['claims'])}{table.END}" in text
    assert {one["verdict"] for one in recorded["claims"].values()} <= set(findings.VERDICTS)
    assert set(recorded["claims"]) == {claim.name for claim in register.CLAIMS}
    assert not recorded["environment"]["git"]["dirty"]
