"""Trains micro tied and untied from the same start on the same batches, and compares held-out loss.

    python -m experiments.tied_vs_untied.run
    python -m experiments.tied_vs_untied.run --quick
    python -m experiments.tied_vs_untied.run --seeds 0,1,2 --config.model.position=rotary

The same command goes on where an earlier one was stopped; runs that have finished are kept.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.recording import samples
from headlab import cli
from headlab.errors import UsageError

ROOT = Path(__file__).parents[2]
HEADS = ("tied", "untied")
# Quick: both models within five minutes on two cores, the embedded corpus built on the way.
QUICK = (("train.steps", "150"), ("eval.every", "75"), ("checkpoint.every", "75"))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the experiment from a command line; the exit code is that of `headlab`."""
    return cli.guarded(_run, argv)


def _run(arguments: list[str]) -> int:
    arguments, overrides = cli.split_overrides(arguments)
    options = _parser().parse_args(arguments)
    for key, flag in (("head.name", "nothing: both heads are trained"), ("seed", "--seeds")):
        if key in dict(overrides):
            raise UsageError(f"--config.{key} is set by the experiment; use {flag}")
    chosen = [*(QUICK if options.quick else ()), *overrides]
    if options.steps is not None:
        chosen.append(("train.steps", str(options.steps)))
    workdir = options.workdir or "runs/tied_vs_untied" + ("-quick" if options.quick else "")
    seeds = _seeds(options.seeds)
    results = compare(options.config, chosen, seeds, Path(workdir))

    from experiments.tied_vs_untied import report

    report.show(results)
    for name in ("report.html", "curves.png", "results.json"):
        print(Path(workdir) / name)
    return 0


def compare(
    config_file: str, overrides: Sequence[tuple[str, str]], seeds: Sequence[int], workdir: Path
) -> dict[str, Any]:
    """Trains what is not trained yet, one run directory a head and seed, and reads the results.

    Writes results.json, which holds what is returned, curves.png and report.html into `workdir`.

    Returns:
      summary: see `report.summarise`. runs: head, seed and result.json of each run. curves: see
      `figures.draw`. samples: see `recording.samples`. config: of the first run.
    """
    # Everything is read and checked before anything starts; only then come the heavy imports.
    from headlab.config import load, to_json

    configs = {
        (head, seed): load(config_file, [*overrides, ("head.name", head), ("seed", str(seed))])
        for seed in seeds
        for head in HEADS
    }
    from experiments.tied_vs_untied import figures, report
    from headlab import training
    from headlab.runs import RunDirectory
    from headlab.sweeps.page import write_report

    results: dict[str, list[dict[str, Any]]] = {head: [] for head in HEADS}
    runs, curves = [], []
    for number, ((head, seed), config) in enumerate(configs.items(), start=1):
        run = RunDirectory(workdir / f"{head}-seed{seed}")
        if run.result_path.exists():
            RunDirectory.create_or_open(run.path, config)  # refuses a run of another config
        elif config.log.progress:
            print(f"{head}, seed {seed} (run {number} of {len(configs)})", file=sys.stderr)
        result = run.result() or training.train(config, str(run.path))
        results[head].append(result)
        runs.append({"head": head, "seed": seed, "result": result})
        curves.append({"head": head, "seed": seed, **_curves(run.metrics())})
    found = {
        "summary": report.summarise(results),
        "runs": runs,
        "curves": curves,
        "samples": samples({head: workdir / f"{head}-seed{seeds[0]}" for head in HEADS}),
        "config": json.loads(to_json(next(iter(configs.values())))),
    }
    figures.draw(curves).savefig(workdir / "curves.png", dpi=150)
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    (workdir / "results.json").write_text(text, encoding="utf-8")
    write_report(workdir, workdir / "report.html", title="Tied or untied?", baseline="head=tied")
    return found


def _curves(metrics: Sequence[Mapping[str, Any]]) -> dict[str, list[list[float]]]:
    """[step, nats a token] of the training loss and of the held-out loss."""
    return {
        part: [
            [record["step"], record[f"{part}/loss"]]
            for record in metrics
            if f"{part}/loss" in record
        ]
        for part in ("train", "validation")
    }


def _seeds(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts) or len({*map(int, parts)}) < len(parts):
        raise UsageError(
            f"--seeds={text}: give different integers of at least 0, as in --seeds=0,1,2"
        )
    return [int(part) for part in parts]


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m experiments.tied_vs_untied.run",
        description="Trains micro tied and untied, and compares their held-out loss.",
        epilog="Any option of the config file is set by --config.KEY=VALUE (see headlab options).",
        allow_abbrev=False,
    )
    micro = str(ROOT / "configs" / "micro.py")
    parser.add_argument("--quick", action="store_true", help="a few hundred steps, in minutes")
    parser.add_argument("--steps", type=cli.count, metavar="N", help="steps of each run")
    parser.add_argument("--seeds", default="0", metavar="0,1,2", help="a pair of runs for each")
    parser.add_argument(
        "--workdir", metavar="DIR", help="default: runs/tied_vs_untied, or …-quick with --quick"
    )
    parser.add_argument("--config", default=micro, metavar="FILE", help="default: configs/micro.py")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


if __name__ == "__main__":
    sys.exit(main())
