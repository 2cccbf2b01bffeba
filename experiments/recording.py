"""Keeps a finished sweep small enough to be committed: all that its runs say, without checkpoints, logs and tokenizers.

    python -m experiments.recording runs/tied_vs_untied_sweep experiments/tied_vs_untied/recorded

The folder reads as the sweep itself does, with `headlab compare FOLDER`, `headlab report FOLDER` and
`headlab.sweeps.load(FOLDER)`. With --so-far it is of the points that have finished; a sweep whose workdir is a copy of
it takes these as done, and trains the others.
"""

import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headlab import cli, files
from headlab.errors import UsageError

#: What is kept of a run.
KEPT = ("config.json", "metrics.jsonl", "result.json")

PROMPTS = ("The river is", "And the king said", "A small town in")
NEW_TOKENS = 40
TEMPERATURES = (0.0, 0.8)


def main(argv: Sequence[str] | None = None) -> int:
    """Records a sweep from a command line; the exit code is that of `headlab`."""
    return cli.guarded(_run, argv)


def _run(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    workdir, folder = Path(options.workdir), Path(options.folder)
    for path in record(workdir, folder, so_far=options.so_far, page=not options.no_page):
        print(path)
    return 0


def record(workdir: Path, folder: Path, *, so_far: bool = False, page: bool = True) -> list[Path]:
    """Copies what the runs of a finished sweep say into `folder`, and writes beside it what they come to.

    Beside sweep.json and a directory a run, with its config.json, metrics.jsonl and result.json, the folder gets
    comparison.json and comparison.md (`headlab compare`), samples.json (how the first seed of each group goes on from
    three prompts; of a run without checkpoints, what a samples.json in `workdir` has), losses.png (`draw`) and
    report.html (`headlab report`). Everything is made before `folder` is there.

    Args:
      so_far: of an unfinished sweep, the points that have finished; the page names the others.
      page: write report.html, which is 5 MB, nearly all of it the library that draws; `headlab report` makes it of the
        folder at any time.

    Raises:
      UsageError: `workdir` is no sweep, or its runs aren't all finished (with `so_far`, none is) and whole; the source
        of one differed from its git commit, or is of none, so that nobody could make the numbers again; a run has
        neither checkpoints nor samples; or `folder` has something in it.
    """
    from headlab.sweeps.comparison import compare
    from headlab.sweeps.formats import as_json, as_markdown
    from headlab.sweeps.page import write_report
    from headlab.sweeps.results import collect, table

    collection = collect(workdir)
    if not collection.sweeps:
        raise UsageError(f"{workdir} is no sweep: there is no sweep.json in it")
    runs = [run for run in collection.runs if run.result is not None]
    unfinished = [run.name for run in collection.runs if run.result is None]
    unfinished += [problem.name for problem in collection.not_started]
    damaged = [problem.name for problem in collection.left_out]
    if not runs or damaged or (unfinished and not so_far):
        names = damaged if so_far and runs else [*unfinished, *damaged]
        raise UsageError(
            f"{len(names)} of the points of {workdir} cannot be recorded, for they have not finished or are "
            f"damaged: {', '.join(names)}. Run its sweep to the end first"
            + ("." if damaged or not runs else ", or record what has finished with --so-far.")
        )
    for run in runs:
        assert run.result is not None
        git = run.result["environment"]["git"]
        if git is None or git["dirty"]:
            which = "is in no git repository" if git is None else "differed from its commit"
            raise UsageError(
                f"{run.name} was trained by source that {which}, so that "
                "its numbers could not be made again. Train it from a clean clone."
            )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is there already and not empty; remove it or choose another")

    frame = table(collection._replace(runs=runs))
    comparison = compare(frame)
    firsts = {row.group.name: Path(row.group.rows["path"].iloc[0]) for row in comparison.rows}
    building = files.temporary(folder)
    shutil.rmtree(building, ignore_errors=True)
    try:
        for run in runs:
            (building / run.path.name).mkdir(parents=True)
            for name in KEPT:
                shutil.copyfile(run.path / name, building / run.path.name / name)
        shutil.copyfile(workdir / "sweep.json", building / "sweep.json")
        files.write_json(building / "samples.json", _samples(workdir, firsts))
        (building / "comparison.json").write_text(as_json(comparison, frame), encoding="utf-8")
        (building / "comparison.md").write_text(as_markdown(comparison, frame), encoding="utf-8")
        draw(comparison, runs).savefig(building / "losses.png", dpi=150)
        if page:
            write_report(building, building / "report.html")
        if folder.exists():
            folder.rmdir()
        folder.parent.mkdir(parents=True, exist_ok=True)
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return sorted(path for path in folder.iterdir() if path.is_file())


def _samples(workdir: Path, firsts: Mapping[str, Path]) -> list[dict[str, Any]]:
    """`samples` of the runs that have checkpoints; those of the others were written when they were recorded."""
    from headlab.checkpoint_files import saved_checkpoints
    from headlab.runs import RunDirectory

    try:
        kept = json.loads((workdir / "samples.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        kept = []
    there = {
        head: path
        for head, path in firsts.items()
        if saved_checkpoints(RunDirectory(path).checkpoints_dir)
    }
    earlier = [sample for sample in kept if sample["head"] in firsts.keys() - there.keys()]
    without = firsts.keys() - there.keys() - {sample["head"] for sample in earlier}
    if without:
        paths = ", ".join(str(firsts[head]) for head in sorted(without))
        raise UsageError(
            f"{paths}: no checkpoints, and {workdir} has no samples.json with samples of theirs. Record the directory "
            "that they were trained in, or train them again."
        )
    return [*earlier, *samples(there)]


def samples(runs: Mapping[str, Path]) -> list[dict[str, Any]]:
    """How the model of each run goes on from each prompt: head (the mapping's key), prompt, temperature and text.

    Temperature 0 is greedy. A prompt stands at the beginning of a document; the text ends where the model ends the
    document.
    """
    from headlab.runs import RunDirectory, restore_model
    from headlab.scoring import generate

    found = []
    for head, path in runs.items():
        model, _, tokenizer, config, _ = restore_model(RunDirectory(path))
        longest = config.model.max_length
        encoded = {text: [tokenizer.separator_id, *tokenizer.encode(text)] for text in PROMPTS}
        prompts = {text: ids for text, ids in encoded.items() if len(ids) < longest}
        room = longest - max(map(len, prompts.values()), default=0)
        for temperature in TEMPERATURES:
            continuations = generate(
                model,
                list(prompts.values()),
                max_new_tokens=min(NEW_TOKENS, room),
                max_length=longest,
                temperature=temperature,
                seed=config.seed,
            )
            for prompt, ids in zip(prompts, continuations, strict=True):
                end = ids.index(tokenizer.separator_id) if tokenizer.separator_id in ids else None
                found.append(
                    {
                        "head": head,
                        "prompt": prompt,
                        "temperature": temperature,
                        "text": tokenizer.decode(ids[:end]),
                    }
                )
    return found


def draw(comparison: Any, runs: Iterable[Any]) -> Any:
    """Held-out loss over the steps, a line a group, the mean of its seeds; and what each differs from the baseline.

    A group is called by its head, where no two have the same. Differences are those of `headlab.sweeps.comparison`: a
    mark a pair of runs of one seed, a dot for the mean, and the 95% interval of Student's t. `runs` are those of
    `headlab.sweeps.results.collect`.
    """
    import numpy as np
    from matplotlib.figure import Figure

    from headlab.analysis.plots import COLOURS
    from headlab.sweeps.page.curves import curve

    curves = {run.name: dict(zip(*curve(run, "validation/loss"), strict=True)) for run in runs}
    rows = comparison.rows
    compared = [row for row in rows if row.difference is not None]
    size = (7 + 2 * (len(rows) > 4), 4 + 0.4 * len(compared))
    figure = Figure(figsize=size, layout="constrained")
    losses, differences = figure.subplots(2, 1, height_ratios=(3.2, 0.6 + 0.4 * len(compared)))
    names = _labels(rows)
    colours = _colours(names.values(), COLOURS)
    for row in rows:
        own = [curves[name] for name in row.group.rows["name"]]
        steps = sorted(set.intersection(*map(set, own)))
        mean = [float(np.mean([losses_of[step] for losses_of in own])) for step in steps]
        name = names[row.group.name]
        losses.plot(steps, mean, color=colours[name], linewidth=1.4, label=name)
    seeds = sorted({row.n for row in rows})
    of_seeds = f", mean of {'–'.join(map(str, seeds))} seeds" if seeds != [1] else ""
    losses.set_xlabel("step")
    losses.set_ylabel(f"held-out loss{of_seeds}\n(nats per token)")
    # beside the axes, where there are too many to leave room for them between the curves
    beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if len(rows) > 4 else {}
    losses.legend(frameon=False, fontsize=8, **beside)
    differences.axvline(0, color="0.4", linewidth=1)
    for place, row in enumerate(compared):
        difference, colour = row.difference, colours[names[row.group.name]]
        own = list(difference.by_seed.values())
        differences.plot(own, [place] * len(own), "|", color=colour, markersize=9)
        if difference.low is not None:
            differences.plot([difference.low, difference.high], [place] * 2, color=colour)
        differences.plot(difference.mean, place, "o", color=colour, markersize=5)
    differences.set_yticks(
        range(len(compared)), [names[row.group.name] for row in compared], fontsize=8
    )
    differences.set_ylim(len(compared) - 0.5, -0.5)
    baselines = {names[row.difference.baseline] for row in compared}
    differences.set_xlabel(
        f"difference to {' or '.join(sorted(baselines))}, {comparison.metric.words}, 95% interval\n"
        f"({comparison.metric.unit})"
    )
    for axes in (losses, differences):
        axes.grid(color="0.92")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _labels(rows: Sequence[Any]) -> dict[str, str]:
    heads = {row.group.name: str(row.group.rows["head"].iloc[0]) for row in rows}
    return heads if len({*heads.values()}) == len(rows) else {name: name for name in heads}


def _colours(names: Iterable[str], colours: Sequence[str]) -> dict[str, str]:
    """Tied blue and untied red, as everywhere; the others take what is left, and begin anew where there are more."""
    known = {"tied": colours[0], "untied": colours[1]}
    others = [name for name in sorted(names) if name not in known]
    free = colours[2:]
    return known | {name: free[number % len(free)] for number, name in enumerate(others)}


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m experiments.recording",
        description="Keeps what a finished sweep says, without its checkpoints.",
        epilog="For instance: python -m experiments.recording runs/zoo experiments/head_zoo/recorded/parameters",
        allow_abbrev=False,
    )
    parser.add_argument("workdir", metavar="WORKDIR", help="of `headlab sweep`, with checkpoints")
    parser.add_argument("folder", metavar="FOLDER", help="new or empty; where to keep it")
    parser.add_argument(
        "--so-far",
        action="store_true",
        help="of an unfinished sweep, the points that have finished",
    )
    parser.add_argument(
        "--no-page",
        action="store_true",
        help="without report.html, which `headlab report FOLDER` makes of the rest",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


if __name__ == "__main__":
    sys.exit(main())
