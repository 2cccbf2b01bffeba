"""Trains every head from its config at micro size and puts parameters, loss, speed and memory into one table.

    python -m experiments.benchmarks.heads
    python -m experiments.benchmarks.heads --steps=1000 --head=tied --head=mixtape

Each head trains in a process of its own, one after another. Run again, it goes on where it was stopped.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from headlab import cli, heads
from headlab.errors import HeadlabError
from headlab.runs import RunDirectory

ROOT = Path(__file__).parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark from a command line; the exit code is that of `headlab`."""
    return cli.guarded(_run, argv)


def _run(arguments: list[str]) -> int:
    arguments, overrides = cli.split_overrides(arguments)
    options = _parser().parse_args(arguments)
    folder = Path(options.workdir)
    found = {}
    for name in options.heads or heads.names():
        config = ROOT / "configs" / "heads" / f"{name}.py"
        chosen = [("train.steps", str(options.steps)), *overrides]
        found[name] = train(config, folder / name, chosen)
    _print_table(found, options.steps)
    path = folder / "heads.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")
    return 0


def train(config: Path, workdir: Path, overrides: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """What the finished run found, trained by `headlab train` where it has not been.

    Returns "parameters" (by part), "loss" (held-out, nats a token), "bits_per_byte", "tokens_per_second" (the median
    between logs) and "peak_bytes", the most memory that the process held; and "environment".

    Raises HeadlabError where the training fails.
    """
    run, peak = RunDirectory(workdir), workdir / "peak_bytes.json"
    if not peak.exists() or run.result() is None:
        command = [sys.executable, "-m", "headlab.cli", "train", f"--config={config}"]
        command += [f"--config.{key}={value}" for key, value in overrides]
        # this clone's headlab, also where none or another one is installed
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path}
        process = subprocess.Popen([*command, f"--workdir={workdir}"], env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = code = os.waitstatus_to_exitcode(status)
        if code:
            raise HeadlabError(f"training {workdir.name} ended with code {code}; see above")
        unit = 1 if sys.platform == "darwin" else 1024
        peak.write_text(json.dumps(usage.ru_maxrss * unit))
    result = run.result()
    assert result is not None
    speeds = [record.get("timing/tokens_per_second") for record in run.metrics()]
    return {
        "parameters": result["parameters"],
        "loss": result["validation"]["loss"],
        "bits_per_byte": result["validation"]["bits_per_byte"],
        "tokens_per_second": float(np.median([speed for speed in speeds if speed is not None])),
        "peak_bytes": json.loads(peak.read_text()),
        "environment": result["environment"],
    }


def _print_table(found: dict[str, dict[str, Any]], steps: int) -> None:
    table = Table(
        title=f"Every head at micro size, {steps} steps, one seed: decides nothing about losses",
        box=box.SIMPLE,
        title_justify="left",
    )
    table.add_column("head", no_wrap=True)
    for heading in ("parameters", "of the head", "held-out loss", "tokens/s", "peak MB"):
        table.add_column(heading, justify="right")
    for name, figures in found.items():
        parameters = figures["parameters"]
        table.add_row(
            name,
            f"{parameters['total']:,}",
            f"{parameters['head']:,}",
            f"{figures['loss']:.4f}",
            f"{figures['tokens_per_second']:,.0f}",
            f"{figures['peak_bytes'] / 1e6:,.0f}",
        )
    Console().print(table)


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m experiments.benchmarks.heads",
        description=__doc__.partition("\n")[0],
        epilog="Any option of the configs is set by --config.KEY=VALUE.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--head", dest="heads", action="append", choices=heads.names())
    parser.add_argument("--steps", type=cli.count, default=200, help="steps of each")
    parser.add_argument("--workdir", metavar="FOLDER", default="runs/heads", help="a run each")
    return parser


if __name__ == "__main__":
    sys.exit(main())
