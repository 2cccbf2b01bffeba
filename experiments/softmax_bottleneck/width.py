"""Part 3, width: the loss and the rank of one softmax and of a mixture, as the head alone becomes wider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
from headlab.sweeps.comparison import mean_and_error, paired_difference

SWEEP = ROOT / "configs" / "sweeps" / "head_width.py"
LINEAR, MIXTURE = "low_rank", "mixture_of_softmaxes"


class Found(NamedTuple):
    """The search for rates, what it chose, and the runs at the chosen rates."""

    search: Trained
    rates: list[dict[str, Any]]
    seeds: Trained


def trained(workdir: Path, how: How) -> Found:
    """Trains the search, writes `workdir`/width/rates.json, and trains the seeds at those rates."""
    word = "tiny" if how.tiny else ""
    folder = workdir / "width"
    search_how = how
    if how.search_steps is not None:
        others = [(key, value) for key, value in how.overrides if key != "train.steps"]
        own = ("train.steps", str(how.search_steps))
        search_how = how._replace(overrides=(*others, own))
    middle = [] if how.search_rate is None else [f"centre={how.search_rate}"]
    search = train(_file(word, *middle), folder / "search", search_how)
    rates = best_rates(search)
    if not rates:
        return Found(search, [], Trained([], []))
    files.write_json(folder / "rates.json", rates)
    file = _file(word, f"rates={folder / 'rates.json'}")
    return Found(search, rates, train(file, folder / "seeds", how))


def _file(*words: str) -> str:
    """The sweep file with its words."""
    text = ",".join(filter(None, words))
    return f"{SWEEP}:{text}" if text else str(SWEEP)


def best_rates(search: Trained) -> list[dict[str, Any]]:
    """The rate of the least validation loss of each head and width whose search is over.

    Each has "head", "width", "peak_rate", "tried" ([rate, loss] ascending, the loss of a failed run None), and
    "at_edge", whether no rate beyond the best was tried on one side: a better one may lie there. A search with points
    that have neither finished nor failed is not over.
    """
    tried: dict[tuple[str, int], dict[float, float | None]] = {}
    is_open: set[tuple[str, int]] = set()
    for point in [*search.runs, *search.unfinished]:
        options = point["options"]
        key = options["head.name"], _width(options)
        tried.setdefault(key, {})[options["optimizer.peak_rate"]] = point.get("loss")
        if point.get("state", "failed") != "failed":
            is_open.add(key)
    choices = []
    for (head, width), losses in sorted(tried.items(), key=lambda item: (item[0][1], item[0][0])):
        known = {rate: loss for rate, loss in losses.items() if loss is not None}
        if not known or (head, width) in is_open:
            continue
        best = min(known, key=known.__getitem__)
        choices.append(
            {
                "head": head,
                "width": width,
                "peak_rate": best,
                "at_edge": best in (min(losses), max(losses)),
                "tried": [[rate, losses[rate]] for rate in sorted(losses)],
            }
        )
    return choices


def measure(found: Found, workdir: Path, how: How) -> dict[str, Any]:
    """Measures the finished runs, and writes width.json, and width.png where there is any, into `workdir`.

    Returns what is written: "summary" (see `summarise`), "differences" (see there), "runs" with rank and theory as
    rank.json has them, the "rates" and the "search" that they are of, "unfinished" of both sweeps, "contexts", "split",
    the command, and the versions.
    """
    from headlab.runs import environment

    runs = [as_recorded(run) for run in with_ranks(found.seeds.runs, how.contexts)]
    summary = summarise(runs, found.rates)
    results = {
        "contexts": how.contexts,
        "split": SPLIT,
        "summary": summary,
        "differences": differences(runs),
        "runs": runs,
        "rates": found.rates,
        "search": [
            {key: value for key, value in run.items() if key not in ("path", "test_loss")}
            for run in found.search.runs
        ],
        "unfinished": [*found.search.unfinished, *found.seeds.unfinished],
        "command": list(how.command),
        "environment": environment(),
    }
    files.write_json(workdir / "width.json", results)
    if runs:
        _figure(summary).savefig(workdir / "width.png", dpi=150)
    return results


def summarise(
    runs: Sequence[Mapping[str, Any]], rates: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A row a head and width, over seeds.

    "head", "width", "peak_rate", "at_edge", "seeds" (how many), "loss" and "test_loss" ([mean, standard error], nats a
    token), "ranks" (of each seed), "at_least" (whether some rank is only a lower bound), "bound" of the theorem,
    "vocab_size", "parameters", "parameters_head" and "parameters_body".
    """
    rows = []
    for choice in rates:
        own = [
            run
            for run in runs
            if (run["head"], _width(run["options"])) == (choice["head"], choice["width"])
        ]
        if not own:
            continue
        rows.append(
            {
                **{key: choice[key] for key in ("head", "width", "peak_rate", "at_edge")},
                "seeds": len(own),
                "loss": mean_and_error([run["loss"] for run in own]),
                "test_loss": mean_and_error([run["test_loss"] for run in own]),
                "ranks": [run["rank"]["rank"] for run in own],
                "at_least": any(run["rank"]["at_least"] for run in own),
                **{key: own[0]["theory"][key] for key in ("bound", "vocab_size")},
                **{
                    key: own[0][key] for key in ("parameters", "parameters_head", "parameters_body")
                },
            }
        )
    return rows


def differences(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Validation loss of the mixture minus that of the linear head of the same width, paired by seed.

    "width", "loss" ([mean, low, high], nats a token: the ends of the 95% interval of Student's t, None of one pair) and
    "seeds" (those that both have).
    """
    losses: dict[tuple[str, int], dict[int, float]] = {}
    for run in runs:
        own = losses.setdefault((run["head"], _width(run["options"])), {})
        own[run["seed"]] = run["loss"]
    found = []
    for width in sorted({width for _, width in losses}):
        mixture, linear = (losses.get((head, width), {}) for head in (MIXTURE, LINEAR))
        if seeds := sorted(mixture.keys() & linear.keys()):
            found.append(
                {"width": width, "loss": paired_difference(mixture, linear), "seeds": seeds}
            )
    return found


def show(results: dict[str, Any]) -> None:
    """Prints a table of what `measure` found."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"loss and rank by the width of the head, {results['contexts']:,} contexts of the "
        f"{results['split']} split",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        caption="± standard error over seeds; * the best rate is at the edge of those tried",
    )
    table.add_column("head", overflow="fold")
    for column in ("d", "peak rate", "loss", "rank", "theorem: at most", "V", "head parameters"):
        table.add_column(column, justify="right")
    for row in results["summary"]:
        mean, error = row["loss"]
        table.add_row(
            row["head"],
            str(row["width"]),
            f"{row['peak_rate']:.2g}{'*' if row['at_edge'] else ''}",
            f"{mean:.4f}" + ("" if error is None else f" ± {error:.4f}"),
            rank_text({"rank": min(row["ranks"]), "at_least": row["at_least"]})
            + (f" … {max(row['ranks']):,}" if len(set(row["ranks"])) > 1 else ""),
            bound_text(row),
            f"{row['vocab_size']:,}",
            f"{row['parameters_head']:,}",
        )
    console = Console()
    console.print(table)
    for each in results["differences"]:
        mean, low, high = each["loss"]
        interval = "one pair" if low is None else f"95% interval {low:+.4f} … {high:+.4f}"
        console.print(
            f"d = {each['width']}: {MIXTURE} - {LINEAR} = {mean:+.4f} nats a token ({interval})"
        )


def _width(options: Mapping[str, Any]) -> int:
    return options["head.rank"] if "head.rank" in options else options["head.d_latent"]


def _figure(summary: Sequence[Mapping[str, Any]]) -> Any:
    """Mean loss against mean rank on a log axis, each point with its width."""
    from headlab.analysis.plots import draw_loss

    places = [(row, mean_and_error(row["ranks"])[0], row["loss"][0]) for row in summary]
    points: dict[str, list[tuple[float, float]]] = {}
    for row, rank, loss in places:
        points.setdefault(row["head"], []).append((rank, loss))
    figure = draw_loss(points)
    (axes,) = figure.axes
    axes.set_xscale("log")
    for row, rank, loss in places:
        axes.annotate(
            f"d = {row['width']}",
            (rank, loss),
            xytext=(5, 4),
            textcoords="offset points",
            fontsize=8,
        )
    return figure
