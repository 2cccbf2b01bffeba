"""What parts 2 and 3 share: runs of a sweep, trained or taken as they are, and the rank of each on held-out text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headlab.errors import UsageError

ROOT = Path(__file__).parents[2]
SPLIT = "validation"

_COLUMNS = (
    "loss",
    "bits_per_byte",
    "test_loss",
    "parameters",
    "parameters_embedding",
    "parameters_head",
    "parameters_body",
)


class How(NamedTuple):
    """How runs are trained and measured."""

    contexts: int  # rows of each log-probability matrix
    overrides: tuple[tuple[str, str], ...] = ()  # of the config of every run
    tiny: bool = False
    jobs: int = 1
    vectorized: bool = False
    retry: bool = False
    measure_only: bool = False  # train nothing
    search_steps: int | None = None  # of the runs of width's search; None: those of its sweep file
    search_rate: str | None = None  # the middle of the rates tried; None: that of its sweep file
    command: tuple[str, ...] = ()


class Trained(NamedTuple):
    """The points of one sweep: those that have finished, and the others.

    Attributes:
      runs: "name", "path", "options" (what the point sets), "seed", and of its result "loss" and "bits_per_byte"
        (validation), "test_loss", "parameters" and its parts.
      unfinished: "name", "options", "state" and "error".
    """

    runs: list[dict[str, Any]]
    unfinished: list[dict[str, Any]]


def train(file: str, workdir: Path, how: How) -> Trained:
    """Trains the points of a sweep file that have not finished, one process each, and reads what finished.

    Raises:
      UsageError: before anything starts, where the validation split has fewer targets than contexts are asked for; and
        those of `headlab.sweeps.plan` and `run`.
      Interrupted: by a signal; the same call goes on.
    """
    from headlab import data, sweeps

    plan = sweeps.plan(file, how.overrides)
    config = plan.points[0].config
    available = data.open_dataset(config.data, progress=config.log.progress).store.n_tokens(SPLIT)
    if how.contexts > available - 1:
        raise UsageError(
            f"--contexts is {how.contexts}; the {SPLIT} split of {config.data.corpus} has {available - 1} targets, and "
            "contexts must be 1 … that many"
        )
    if how.measure_only:
        statuses = sweeps.statuses(plan, str(workdir))
    else:
        statuses = sweeps.run(
            plan,
            str(workdir),
            jobs=how.jobs,
            retry=how.retry,
            vectorized=how.vectorized,
            command=how.command,
        )
    options = {
        status.name: dict(point.overrides)
        for point, status in zip(plan.points, statuses, strict=True)
    }
    finished = [workdir / status.name for status in statuses if status.state == "finished"]
    rows = {} if not finished else _rows(sweeps.load(finished))
    return Trained(
        [{**row, "options": options[name]} for name, row in rows.items()],
        [
            {
                "name": status.name,
                "options": options[status.name],
                "state": status.state,
                "error": status.error,
            }
            for status in statuses
            if status.name not in rows
        ],
    )


def with_ranks(runs: Iterable[Mapping[str, Any]], contexts: int) -> list[dict[str, Any]]:
    """The runs with "measured": their `rank_record`."""
    return [{**run, "measured": rank_record(Path(run["path"]), contexts)} for run in runs]


def rank_record(run: Path, contexts: int) -> dict[str, Any]:
    """rank.json of a run (see `headlab.analysis.run_rank.as_dict`), measured where it is not of this very question.

    It is taken as it is if it is of the last checkpoint, validation text and as many contexts, without a sketch.
    """
    from headlab.analysis import run_rank
    from headlab.checkpoint_files import saved_checkpoints
    from headlab.runs import RunDirectory

    last = max(saved_checkpoints(RunDirectory(run).checkpoints_dir), default=None)
    try:
        kept = json.loads((run / "rank.json").read_text(encoding="utf-8"))
        there = kept["step"], kept["split"], kept["contexts"], kept["rank"]["sketch"]
        if there == (last, SPLIT, contexts, None):
            return kept
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass  # none yet, or one that a kill left half written
    found = run_rank.rank_of_run(run, contexts, split=SPLIT)
    run_rank.write(found, run)
    return run_rank.as_dict(found)


def as_recorded(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run of `with_ranks` as results hold it: without its path and singular values, which its rank.json keeps."""
    kept = {key: value for key, value in run.items() if key not in ("path", "measured")}
    measured = {
        key: value
        for key, value in run["measured"].items()
        if key not in ("singular_values", "environment")
    }
    return {**kept, **measured}


def rank_text(rank: Mapping[str, Any]) -> str:
    """A rank as tables show it: "≥ 512" where it is only a lower bound."""
    return f"{'≥ ' if rank['at_least'] else ''}{rank['rank']:,}"


def bound_text(theory: Mapping[str, Any]) -> str:
    """The theorem's bound as tables show it."""
    return "none below V" if theory["bound"] is None else f"{theory['bound']:,}"


def _rows(frame: Any) -> dict[str, dict[str, Any]]:
    """The finished runs of `sweeps.load` by the name of their directory."""
    return {
        Path(row["path"]).name: {
            "name": Path(row["path"]).name,
            "path": row["path"],
            "head": row["head"],
            "seed": int(row["seed"]),
            **{
                column: int(row[column]) if "parameters" in column else float(row[column])
                for column in _COLUMNS
            },
        }
        for row in frame.to_dict("records")
    }
