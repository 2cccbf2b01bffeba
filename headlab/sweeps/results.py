"""Results of many runs as one table: a row a run, without starting JAX."""

import hashlib
import json
import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from headlab.config import ABSENT, OPTIONS
from headlab.errors import HeadlabError
from headlab.run_files import RunDirectory
from headlab.sweeps.directories import Paths, Problem, failure_of, names_of, run_directories

_SPLITS = ("train", "validation", "test")
_SIZES = ("documents", "bytes", "tokens")

BANDS = tuple(f"band_{number}" for number in range(10))
"""Columns of the held-out loss by frequency band of the target, the most frequent tenth of the ids first."""

_RECORDED = {
    "loss": ("validation", "loss"),
    "bits_per_byte": ("validation", "bits_per_byte"),
    "best_loss": ("best", "loss"),
    "best_step": ("best", "step"),
    "test_loss": ("test", "loss"),
    "test_bits_per_byte": ("test", "bits_per_byte"),
    "train_loss": ("train_loss",),
    "parameters": ("parameters", "total"),
    "parameters_embedding": ("parameters", "embedding"),
    "parameters_head": ("parameters", "head"),
    "parameters_body": ("parameters", "body"),
    "tokens_seen": ("tokens_seen",),
    "wall_seconds": ("wall_seconds",),
}
"""Where result.json has the number of a column."""

MEASURES = (*_RECORDED, "tokens_per_second", "peak_memory", *BANDS)
"""Columns that only a finished run has; NaN for the others."""

_PLAIN = (
    "name",
    "path",
    "head",
    "seed",
    "state",
    "error",
    "step",
    "steps",
    "last_loss",
    "last_step",
)


class Run(NamedTuple):
    """What the files of one run say."""

    name: str
    path: Path
    config: dict[str, Any]  # by dotted key
    result: dict[str, Any] | None  # None: it has not finished
    metrics: list[dict[str, Any]]
    error: str | None  # what its sweep recorded of its failure


class Collection(NamedTuple):
    """The runs of some sweeps and directories."""

    runs: list[Run]
    left_out: list[Problem]  # damaged runs
    not_started: list[Problem]  # points of a sweep that have no run
    sweeps: dict[Path, dict[str, Any]]  # the content of sweep.json by work directory


def load(workdir_or_runs: Paths) -> pd.DataFrame:
    """A row a run, of one or several run directories, or directories that hold runs.

    Columns:
      name, path, head, seed; step of steps; state: "finished", "unfinished", or "failed" with the error that the
      sweep recorded.
      Each configuration value that varies between the runs, by its dotted key ("(absent)" where a
      head has no such option).
      loss (held-out, nats a token), bits_per_byte, best_loss at best_step, test_loss,
      test_bits_per_byte, train_loss; parameters, and of them parameters_embedding, _head, _body;
      tokens_seen, tokens_per_second (the median over the run), peak_memory (bytes; NaN where it was not
      recorded), wall_seconds; band_0 … band_9: held-out loss by frequency band of the target.
      All of these are NaN until the run has finished, so that no mean takes an unfinished one in.
      last_loss at last_step: the last held-out loss of any run, finished or not.
      text, tokenizer: short hashes that are equal where the corpus is (its name, and the documents
      and bytes of each split), and where its tokens are, too. Nats a token compare only between
      runs of one tokenizer, bits per byte only between runs of one text.

    A run with a damaged config.json, metrics.jsonl or result.json is left out with a warning;
    `frame.attrs["left_out"]` lists those as (name, path, reason), and `frame.attrs["not_started"]`
    the points of a sweep that have no run yet; `frame.attrs["baselines"]` are those of sweep.json.

    Raises:
      UsageError: a path is no run and holds none.
    """
    collection = collect(workdir_or_runs)
    for problem in collection.left_out:
        warnings.warn(f"left out {problem.path}: {problem.reason}", stacklevel=2)
    return table(collection)


def table(collection: Collection) -> pd.DataFrame:
    """The table that `load` gives, of runs that were read before."""
    keys = varying_keys([run.config for run in collection.runs])
    columns = [*_PLAIN, *(key for key in keys if key != "seed"), *MEASURES, "text", "tokenizer"]
    rows = [_row(run, keys) for run in collection.runs]
    # objects, for pandas would make NaN of None and 1.0 of 1
    frame = pd.DataFrame(rows, columns=columns, dtype=object)
    numbers = dict.fromkeys((*MEASURES, "last_loss"), float)
    frame = frame.astype(numbers | dict.fromkeys(("seed", "step", "steps", "last_step"), int))
    frame.attrs["left_out"] = [tuple(problem) for problem in collection.left_out]
    frame.attrs["not_started"] = [tuple(problem) for problem in collection.not_started]
    baselines = [sweep.get("baseline") for sweep in collection.sweeps.values()]
    frame.attrs["baselines"] = [baseline for baseline in baselines if baseline]
    return frame


def collect(workdir_or_runs: Paths) -> Collection:
    """The runs at these paths in order, each once, and what is wrong with others.

    Raises:
      UsageError: a path is no run and holds none.
    """
    paths, not_started, sweeps = run_directories(workdir_or_runs)
    runs, left_out = [], []
    for path, name in zip(paths, names_of(paths), strict=True):
        try:
            runs.append(_read(RunDirectory(path), name))
        except (HeadlabError, OSError) as problem:
            left_out.append(Problem(name, str(path), str(problem)))
    for folder, content in sweeps.items():
        if "damaged" in content:
            left_out.append(Problem("sweep.json", str(folder / "sweep.json"), content["damaged"]))
    return Collection(runs, left_out, not_started, sweeps)


def varying_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values differ between configurations, head.name first, then as `headlab options` lists them."""
    order = {key: number for number, key in enumerate(dict.fromkeys(("head.name", *OPTIONS)))}
    keys = dict.fromkeys(key for config in configs for key in config)
    varying = [key for key in keys if len({typed(config, key) for config in configs}) > 1]
    return sorted(varying, key=lambda key: (order.get(key, len(order)), key))


def typed(config: Mapping[str, Any], key: str) -> tuple[str, Any]:
    """A value by which configurations are told apart: True, 1 and 1.0 are three."""
    value = config.get(key, ABSENT)
    return type(value).__name__, value


def _row(run: Run, keys: Sequence[str]) -> dict[str, Any]:
    held_out = [r for r in run.metrics if r.get("validation/loss") is not None]
    last = held_out[-1] if held_out else {}
    row = {key: run.config.get(key, ABSENT) for key in keys} | {
        "name": run.name,
        "path": str(run.path),
        "head": run.config["head.name"],
        "seed": run.config["seed"],
        "state": _state(run),
        "error": run.error,
        "step": run.metrics[-1]["step"] if run.metrics else 0,
        "steps": run.config["train.steps"],
        "last_loss": last.get("validation/loss", math.nan),
        "last_step": last.get("step", 0),
    }
    return row if run.result is None else row | _measures(run, run.result)


def _state(run: Run) -> str:
    if run.result is not None:
        return "finished"
    return "unfinished" if run.error is None else "failed"


def _measures(run: Run, result: Mapping[str, Any]) -> dict[str, Any]:
    recorded = {column: _number(result, path) for column, path in _RECORDED.items()}
    speeds = [r["timing/tokens_per_second"] for r in run.metrics if "timing/tokens_per_second" in r]
    bands = zip(BANDS, result["validation"]["bands"], strict=True)
    sizes = {what: [_number(result, ("corpus", s, what)) for s in _SPLITS] for what in _SIZES}
    text = [run.config["data.corpus"], sizes["documents"], sizes["bytes"]]
    return {
        **recorded,
        "step": result["steps"],
        "last_loss": recorded["loss"],
        "last_step": result["steps"],
        "tokens_per_second": statistics.median(speeds) if speeds else math.nan,
        "peak_memory": _peak_memory(result.get("peak_memory")),
        **{band: math.nan if loss is None else loss for band, loss in bands},
        "text": _short_hash(text),
        "tokenizer": _short_hash([text, result["vocab_size"], sizes["tokens"]]),
    }


def _read(run: RunDirectory, name: str) -> Run:
    """What a run's files say, checked against each other; HeadlabError for damage."""
    config, metrics, result = run.config_values(), run.metrics(), run.result()
    if result is not None:
        _check_result(run, config, result)
        if metrics and metrics[-1]["step"] != config["train.steps"]:
            raise HeadlabError(
                f"{run.metrics_path} ends at step {metrics[-1]['step']}, but the run has finished "
                f"{config['train.steps']}; restore the file from a copy"
            )
    error = failure_of(run.path) if result is None else None
    found = Run(name, run.path, config, result, metrics, error)
    try:
        _row(found, [])
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise HeadlabError(
            f"{run.path} has records that cannot be read ({type(problem).__name__}: {problem}); "
            "restore result.json and metrics.jsonl from a copy"
        ) from None
    return found


def _check_result(run: RunDirectory, config: Mapping[str, Any], result: Any) -> None:
    """HeadlabError unless result.json is a result, of the configuration beside it."""
    if not isinstance(result, dict):
        raise HeadlabError(f"{run.result_path} is no JSON object; restore it from a copy")
    for key, option in (("head", "head.name"), ("seed", "seed"), ("steps", "train.steps")):
        if result.get(key) != config[option]:
            raise HeadlabError(
                f"{run.result_path} is of {key} {result.get(key)!r}, but config.json says "
                f"{option}={config[option]!r}: the files are of two runs; restore them from a copy"
            )


def _number(result: Mapping[str, Any], path: Sequence[str]) -> int | float:
    value: Any = result
    for part in path:
        value = value[part]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{'.'.join(path)} is {value!r}, not a finite number")
    return value


def _peak_memory(recorded: Any) -> float:
    """Bytes; where they are recorded by device or kind, the most of any. NaN where they are not recorded."""
    values = recorded.values() if isinstance(recorded, Mapping) else [recorded]
    return max(
        (float(value) for value in values if isinstance(value, int | float)), default=math.nan
    )


def _short_hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:8]
