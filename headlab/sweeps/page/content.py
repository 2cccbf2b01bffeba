"""Everything that the page says, read and computed once."""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from headlab import config as configs
from headlab import models
from headlab.errors import UsageError
from headlab.sweeps.comparison import Comparison, Row, compare
from headlab.sweeps.directories import Paths
from headlab.sweeps.page.extras import Spectrum, samples, spectra
from headlab.sweeps.results import Run, collect, table


class Content(NamedTuple):
    """What the sections of the page are made of."""

    runs: list[Run]
    frame: pd.DataFrame  # a row a run, in the same order
    comparison: Comparison | None  # None: nothing has finished
    budgets: dict[
        str, models.Budget | None
    ]  # by name of the group; None where the head is not known here
    questions: list[str]
    commands: list[str]
    spectra: list[Spectrum]
    samples: list[dict[str, Any]]
    notes: list[str]

    @property
    def rows(self) -> Sequence[Row]:
        """The groups, the best first."""
        return self.comparison.rows if self.comparison is not None else ()

    def group_ids(self) -> dict[str, str]:
        """The id of the group of each finished run, by the name of the run: "0" is the best group's."""
        return {
            name: str(number)
            for number, row in enumerate(self.rows)
            for name in row.group.rows["name"]
        }


def read(
    workdirs: Paths, *, baseline: str | Mapping[str, Any] | None = None, metric: str | None = None
) -> Content:
    """Reads runs and what lies beside them, and compares those that have finished.

    Raises UsageError where there are no runs, or where they cannot be compared as asked.
    """
    workdirs = [workdirs] if isinstance(workdirs, str | os.PathLike) else list(workdirs)
    collection = collect(workdirs)
    frame = table(collection)
    comparison, notes = None, []
    if (frame["state"] == "finished").any():
        comparison = compare(frame, baseline=baseline, metric=metric)
        notes += comparison.notes
    elif baseline is not None or metric is not None:
        raise UsageError(
            "no run has finished, so there is nothing to compare: leave out --baseline and --metric"
        )
    else:
        notes.append("No run has finished: there is nothing to compare yet.")
    found_spectra, bad_spectra = spectra(collection.runs)
    found_samples, bad_samples = samples(map(Path, workdirs))
    budgets, unknown = _budgets(comparison.rows if comparison else (), collection.runs)
    sweeps = collection.sweeps.values()
    return Content(
        runs=collection.runs,
        frame=frame,
        comparison=comparison,
        budgets=budgets,
        questions=[str(sweep["question"]) for sweep in sweeps if sweep.get("question")],
        commands=[_command(sweep["command"]) for sweep in sweeps if sweep.get("command")],
        spectra=found_spectra,
        samples=found_samples,
        notes=[*notes, *bad_spectra, *bad_samples, *unknown],
    )


def _budgets(
    rows: Sequence[Row], runs: Sequence[Run]
) -> tuple[dict[str, models.Budget | None], list[str]]:
    by_name = {run.name: run for run in runs}
    found: dict[str, models.Budget | None] = {}
    notes = []
    for row in rows:
        run = by_name[row.group.rows["name"].iloc[0]]
        assert run.result is not None
        try:
            config = configs.from_json((run.path / "config.json").read_text(encoding="utf-8"))
            found[row.group.name] = models.budget(config, run.result["vocab_size"])
        except UsageError as problem:  # a head of another version or clone
            found[row.group.name] = None
            notes.append(
                f"The cost and the rank bound of {row.group.name} are not known: {problem}"
            )
    return found, notes


def _command(command: Any) -> str:
    if isinstance(command, list):
        return shlex.join(map(str, command))
    return command if isinstance(command, str) else json.dumps(command)
