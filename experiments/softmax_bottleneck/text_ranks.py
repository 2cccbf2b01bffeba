"""Part 2, ranks on text: every head is trained on one corpus, and its log-probabilities of held-out text measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.softmax_bottleneck.trained import (
    ROOT,
    SPLIT,
    How,
    Trained,
    as_recorded,
    bound_text,
    rank_text,
    train,
    with_ranks,
)
from headlab import files

SWEEP = ROOT / "configs" / "sweeps" / "text_ranks.py"

#: Yang et al. 2017, table 6; an LSTM on Penn Treebank, whose vocabulary has 10,000 tokens
PUBLISHED = {
    "source": "Yang et al. 2017, arXiv:1711.03953, table 6",
    "corpus": "Penn Treebank, 10,000 tokens",
    "softmax": 400,
    "mixture_of_softmaxes": 9981,
}


def trained(workdir: Path, how: How) -> Trained:
    """The runs in `workdir`/text_ranks, trained where they aren't yet."""
    file = f"{SWEEP}:tiny" if how.tiny else str(SWEEP)
    return train(file, workdir / "text_ranks", how)


def measure(found: Trained, workdir: Path, how: How) -> dict[str, Any]:
    """Measures the finished runs, and writes text_ranks.json, and text_ranks.png where there is any, into `workdir`.

    Returns what is written: "runs", which hold what `trained.Trained` says, and rank and theory as rank.json has them;
    "unfinished"; "published"; "contexts", "split", the command, and the versions.
    """
    from headlab.runs import environment

    runs = with_ranks(found.runs, how.contexts)
    results = {
        "contexts": how.contexts,
        "split": SPLIT,
        "runs": [as_recorded(run) for run in runs],
        "unfinished": found.unfinished,
        "published": PUBLISHED,
        "command": list(how.command),
        "environment": environment(),
    }
    files.write_json(workdir / "text_ranks.json", results)
    if runs:
        _figure(runs).savefig(workdir / "text_ranks.png", dpi=150)
    return results


def show(results: dict[str, Any]) -> None:
    """Prints a table of what `measure` found."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"rank of log-probabilities, {results['contexts']:,} contexts of the {results['split']} split",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        caption=f"published, another model and corpus ({PUBLISHED['source']}; {PUBLISHED['corpus']}): softmax "
        f"{PUBLISHED['softmax']}, mixture of softmaxes {PUBLISHED['mixture_of_softmaxes']:,}",
    )
    table.add_column("head", overflow="fold")
    for column in ("V", "rank", "theorem: at most", "entropy rank", "99.9% of energy", "loss"):
        table.add_column(column, justify="right")
    for run in results["runs"]:
        rank, theory = run["rank"], run["theory"]
        table.add_row(
            run["head"],
            f"{theory['vocab_size']:,}",
            rank_text(rank),
            bound_text(theory),
            f"{rank['entropy_rank']:.1f}",
            f"{rank['energy_ranks']['0.999']:,}",
            f"{run['loss']:.4f}",
        )
    Console().print(table)


def _figure(runs: list[dict[str, Any]]) -> Any:
    import numpy as np

    from headlab.analysis import Spectrum
    from headlab.analysis.plots import draw_spectra

    spectra, bounds = {}, {}
    for run in runs:
        measured = run["measured"]
        values = np.asarray(measured["singular_values"])
        rows, columns = measured["rank"]["rows"], measured["rank"]["columns"]
        spectra[run["head"]] = Spectrum(values, rows, columns, kind=measured["kind"])
        bounds[run["head"]] = measured["theory"]["bound"]
    return draw_spectra(spectra, bounds)
