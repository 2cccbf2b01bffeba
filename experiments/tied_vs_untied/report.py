"""What the runs say: means, their uncertainty over seeds, and the terminal's table and samples."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headlab.sweeps.comparison import mean_and_error, paired_difference

BASELINE = "tied"


def summarise(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A row a head from the content of its runs' result.json, in one order of seeds for all heads.

    Returns:
      head, parameters, seeds (their number), and [mean, standard error] over the seeds (None for
      one seed) of train_loss and held_out_loss, nats a token, and bits_per_byte. difference: of
      held_out_loss to the tied run of the same seed, [mean, low, high] with the 95% interval of
      Student's t (None for one seed); None for tied itself.
    """
    return [
        {
            "head": head,
            "parameters": runs[0]["parameters"]["total"],
            "seeds": len(runs),
            "train_loss": list(mean_and_error([run["train_loss"] for run in runs])),
            "held_out_loss": list(mean_and_error(_held_out(runs))),
            "bits_per_byte": list(
                mean_and_error([run["validation"]["bits_per_byte"] for run in runs])
            ),
            "difference": None
            if head == BASELINE
            else list(paired_difference(_by_seed(runs), _by_seed(results[BASELINE]))),
        }
        for head, runs in results.items()
    ]


def show(results: Mapping[str, Any]) -> None:
    """Prints the summary as a table, and the samples."""
    console = Console()
    console.print(_table(results["summary"]))
    samples = results["samples"]
    for prompt in dict.fromkeys(sample["prompt"] for sample in samples):
        table = Table(title=Text(f"{prompt} …"), title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("head")
        table.add_column("rule", no_wrap=True)
        table.add_column("continuation", overflow="fold")
        for sample in samples:
            if sample["prompt"] == prompt:
                hot = sample["temperature"]
                rule = f"temperature {hot:g}" if hot else "greedy"
                text = "… " + " ".join(sample["text"].split())
                table.add_row(sample["head"], rule, Text(text))
        console.print(table)


def _table(summary: Sequence[Mapping[str, Any]]) -> Table:
    seeds = summary[0]["seeds"]
    spread = "" if seeds == 1 else f"; means of {seeds} seeds ± standard error"
    table = Table(
        title=f"Losses in nats a token{spread}", title_justify="left", box=box.SIMPLE_HEAD
    )
    table.add_column("head")
    columns = ["parameters", "train loss", "held-out loss", "bits per byte", "difference to tied"]
    if seeds > 1:
        columns[-1] += " (95% interval)"
    for column in columns:
        table.add_column(column, justify="right")
    for row in summary:
        table.add_row(
            row["head"],
            f"{row['parameters']:,}",
            *(_with_error(row[key]) for key in ("train_loss", "held_out_loss", "bits_per_byte")),
            _with_interval(row["difference"]),
        )
    return table


def _with_error(value: Sequence[float | None]) -> str:
    mean, error = value
    return f"{mean:.4f}" + ("" if error is None else f" ± {error:.4f}")


def _with_interval(value: Sequence[float | None] | None) -> str:
    if value is None:
        return ""
    mean, low, high = value
    return f"{mean:+.4f}" + ("" if low is None else f" ({low:+.4f} to {high:+.4f})")


def _held_out(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    return [run["validation"]["loss"] for run in runs]


def _by_seed(runs: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    return {run["seed"]: loss for run, loss in zip(runs, _held_out(runs), strict=True)}
