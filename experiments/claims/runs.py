"""The runs that claims share: tied, untied, and tied with untied's parameters in width or depth, in three seeds."""

import functools
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headlab import files
from headlab.errors import HeadlabError

ROOT = Path(__file__).parents[2]
SWEEP = f"{ROOT / 'configs' / 'sweeps' / 'tied_vs_untied.py'}:matched,tiny"
COMMAND = ("python", "-m", "experiments.claims.run")
SPLIT = "validation"
POSITIONS = 4096  # held-out positions that are kept of each run
JOBS = 2  # shapes that are trained at once
EVERY = 8  # of the embedded corpus' documents one is read
#: what the runs have other than configs/tiny.py
OPTIONS = {
    "data.vocab_size": "1000",  # in 1,024 rows: 24 are padding
    "data.seq_len": "64",
    "model.max_length": "64",
    "train.steps": "300",
    "train.batch_size": "16",
    "optimizer.warmup_steps": "15",
    "eval.every": "300",
    "checkpoint.every": "150",
    "log.tensorboard": "false",
}

Runs = dict[str, dict[int, Path]]
"""Run directories by variant ("tied", "untied", "wide", "deep"), then seed."""


class Context:
    """What measures ask for; runs are trained when the first of them asks."""

    def __init__(self, workdir: Path, *, corpus: str = "", options: Mapping[str, str] = OPTIONS):
        """`corpus` is a headlab corpus; by default every eighth document of the embedded one."""
        self.workdir, self._corpus, self._options = workdir, corpus, dict(options)
        self._restored = functools.cache(self._restore)

    @functools.cached_property
    def runs(self) -> Runs:
        """Trains what has not finished, seeds of one shape as one program."""
        corpus = self._corpus or f"text:{english_sample(self.workdir / 'english.txt')}"
        return train(self.workdir / "runs", corpus, self._options)

    def held_out(self, path: Path, contexts: int = POSITIONS) -> Any:
        """A run's model, and its states at the first held-out positions: see `headlab.analysis.held_out_states`."""
        whole = self._restored(path)
        return whole._replace(
            **{k: getattr(whole, k)[:contexts] for k in ("h", "inputs", "targets")}
        )

    def _restore(self, path: Path) -> Any:
        from headlab.analysis import held_out_states

        return held_out_states(path, POSITIONS, split=SPLIT)


def train(folder: Path, corpus: str, options: Mapping[str, str]) -> Runs:
    """The runs of the sweep in `folder`; those that have finished are kept.

    Raises HeadlabError where one failed; `Interrupted` by a signal, after which the same call goes on.
    """
    from headlab import sweeps

    plan = sweeps.plan(SWEEP, [("data.corpus", corpus), *options.items()])
    statuses = sweeps.run(
        plan, str(folder), jobs=JOBS, retry=True, vectorized=True, command=COMMAND
    )
    failed = [status for status in statuses if status.state != "finished"]
    if failed:
        raise HeadlabError(
            f"{len(failed)} of {len(statuses)} runs have not finished, the first {failed[0].name}: {failed[0].error}. "
            "The same command tries them again"
        )
    found: Runs = {}
    for point in plan.points:
        found.setdefault(variant(point.overrides), {})[point.config.seed] = folder / point.name
    return found


def trained_runs(workdir: Path) -> dict[str, Any]:
    """The commit that finished each run in a workdir, with its held-out loss and parameters, by name."""
    found = {}
    for path in sorted((workdir / "runs").glob("*/result.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        found[path.parent.name] = {
            "commit": (result["environment"]["git"] or {}).get("commit"),
            "held_out_loss": result[SPLIT]["loss"],
            "parameters": result["parameters"]["total"],
        }
    return found


def variant(options: Mapping[str, Any]) -> str:
    """The name of a point of the sweep.

    >>> variant({"head.name": "tied", "model.n_layers": 5, "model.d_mlp": 130})
    'deep'
    """
    if options["head.name"] == "untied":
        return "untied"
    return "deep" if "model.n_layers" in options else "wide" if "model.d_mlp" in options else "tied"


def english_sample(path: Path) -> Path:
    """A file with every eighth document of the embedded corpus' train split, written where there is none yet."""
    if not path.exists():
        from headlab import data

        print("reading the embedded corpus", file=sys.stderr)
        corpus = data.open_corpus("headlab_english")
        text = "\n\n".join(_some(corpus.documents("train")))
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, text.encode())
    return path


def _some(documents: Iterator[str]) -> Iterator[str]:
    return (text for number, text in enumerate(documents) if number % EVERY == 0)
