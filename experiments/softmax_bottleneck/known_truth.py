"""Part 1, known truth: distributions of known rank, and how near every head comes to them at each width."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from headlab import files

#: options of the heads that need some at these sizes; low_rank is half as wide as its model, as by default
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "mixture_of_softmaxes": {"n_experts": 2},
    "mixture_of_contexts": {"n_experts": 2},
    "mixture_of_sigsoftmaxes": {"n_experts": 2},
    "mixtape": {"n_experts": 2, "d_gate": 4},
}


class Truth(NamedTuple):
    """What distributions are drawn: row-centred log P `[contexts, vocab]` has this rank."""

    contexts: int = 64
    vocab: int = 32
    rank: int = 6
    scale: float = 2.0  # the standard deviation of a logit, nats
    seed: int = 0


def log_probabilities(truth: Truth) -> Float[np.ndarray, "contexts vocab"]:
    """log softmax(scale·H·Wᵀ) with normal H `[contexts, rank]`, and W `[vocab, rank]`/√rank, centred over tokens."""
    from scipy.special import log_softmax

    rng = np.random.default_rng(truth.seed)
    states = rng.standard_normal((truth.contexts, truth.rank))
    rows = rng.standard_normal((truth.vocab, truth.rank)) / np.sqrt(truth.rank)
    return log_softmax(truth.scale * states @ (rows - rows.mean(axis=0)).T, axis=1)


def measure(
    truth: Truth,
    heads: Sequence[str],
    widths: Sequence[int],
    restarts: int,
    iterations: int,
    workdir: Path,
) -> dict[str, Any]:
    """Fits what isn't fitted yet, and writes known_truth.json and known_truth.png into `workdir`.

    Returns what is written: "fits" (see `fit_all`), the "truth", the numerical rank of its row-centred
    log P, and the settings.
    """
    from headlab.analysis import rank
    from headlab.analysis.plots import draw_excess
    from headlab.runs import environment

    fits = fit_all(truth, heads, widths, restarts=restarts, iterations=iterations, workdir=workdir)
    log_p = log_probabilities(truth)
    found = {
        "truth": truth._asdict(),
        "centred_rank": rank(log_p - log_p.mean(axis=1, keepdims=True)).rank,
        "restarts": restarts,
        "iterations": iterations,
        "fits": fits,
        "environment": environment(),
    }
    points = {
        head: [(fit["width"], max(fit["excess"], 1e-12)) for fit in fits if fit["head"] == head]
        for head in heads
    }
    draw_excess(points, truth.rank).savefig(workdir / "known_truth.png", dpi=150)
    files.write_json(workdir / "known_truth.json", found)
    return found


def show(found: dict[str, Any]) -> None:
    """Prints a table of what `measure` found."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    truth = found["truth"]
    widths = sorted({fit["width"] for fit in found["fits"]})
    table = Table(
        title=f"excess KL, nats a context: row-centred log P of rank {found['centred_rank']}, {truth['contexts']} "
        f"contexts, {truth['vocab']} tokens",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        caption=f"the best of {found['restarts']} restarts; in brackets how far the second best is behind",
    )
    table.add_column("head", overflow="fold")
    for width in widths:
        table.add_column(f"d = {width}", justify="right")
    for head in dict.fromkeys(fit["head"] for fit in found["fits"]):
        own = {fit["width"]: fit for fit in found["fits"] if fit["head"] == head}
        table.add_row(
            head, *(f"{own[w]['excess']:.1e} ({own[w]['agreement']:.0e})" for w in widths)
        )
    Console().print(table)


def fit_all(
    truth: Truth,
    heads: Sequence[str],
    widths: Sequence[int],
    *,
    restarts: int,
    iterations: int,
    workdir: Path,
) -> list[dict[str, Any]]:
    """A row a head and width: "head", "width", "bound", "excess", "agreement", "restarts", "converged".

    Each fit is written down when it is done, under a name that holds all that it depends on, and read again the next
    time. Progress goes to standard error.
    """
    log_p = log_probabilities(truth)
    fits = workdir / "fits"
    fits.mkdir(parents=True, exist_ok=True)
    rows, spent, pairs = [], [], [(head, width) for width in widths for head in heads]
    for number, (head, width) in enumerate(pairs, start=1):
        settings = "-".join(map(str, (*truth, restarts, iterations)))
        file = fits / f"{head}-{width}-{settings}.json"
        if file.exists():
            rows.append(json.loads(file.read_text(encoding="utf-8")))
            continue
        start = time.monotonic()
        row = _fitted(log_p, head, width, restarts, iterations)
        files.replace(file, json.dumps(row).encode())
        rows.append(row)
        spent.append(time.monotonic() - start)
        left = (len(pairs) - number) * sum(spent) / len(spent)
        print(
            f"{number} of {len(pairs)}: {head}, width {width}: {row['excess']:.2e} nats; "
            f"about {left / 60:.1f} min left",
            file=sys.stderr,
        )
    return rows


def _fitted(
    log_p: np.ndarray, name: str, width: int, restarts: int, iterations: int
) -> dict[str, Any]:
    from headlab.analysis import fit_head

    fit = fit_head(
        log_p,
        lambda seed: _build(name, log_p.shape[1], width, seed),
        restarts=restarts,
        iterations=iterations,
    )
    head, _ = _build(name, log_p.shape[1], width, 0)
    return {
        "head": name,
        "width": width,
        "bound": head.rank_bound(),
        "excess": fit.excess,
        "agreement": fit.agreement,
        "restarts": list(fit.restarts),
        "converged": list(fit.converged),
    }


def _build(name: str, vocab: int, width: int, seed: int) -> tuple[Any, Any]:
    from flax import nnx

    from headlab import heads

    options = dict(OPTIONS.get(name, {}))
    if name == "low_rank":
        options["rank"] = max(width // 2, 1)
    if name == "adaptive":
        options |= {"cutoffs": (vocab // 2,), "div_value": 1.0}
    given = dict(vocab_size=vocab, d_model=width, init_scale=1.0, **options)
    embedding = heads.get(name).input_embedding(rngs=nnx.Rngs(seed), **given)
    return heads.build(name, rngs=nnx.Rngs(seed), **given), embedding
