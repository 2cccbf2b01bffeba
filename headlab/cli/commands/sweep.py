"""`headlab sweep`."""

import argparse
import sys
from typing import TYPE_CHECKING

from headlab.cli.arguments import Command, Overrides, count, one_of, path
from headlab.errors import HeadlabError, UsageError

if TYPE_CHECKING:
    from headlab.sweeps import Plan

_SLURM_FLAGS = ("partition", "gpus", "cpus", "memory", "minutes")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=path, required=True, metavar="FILE", help="sweep file, FILE.py[:TEXT]"
    )
    parser.add_argument(
        "--workdir", type=path, required=True, metavar="DIR", help="holds a run for each point"
    )
    parser.add_argument(
        "--launcher", **one_of("local", "slurm"), default="local", help="default: local"
    )
    parser.add_argument(
        "--jobs",
        type=count,
        default=1,
        metavar="N",
        help="points that run at once; they share the cores and GPUs of this machine; default: 1",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the points and their states, and start nothing"
    )
    parser.add_argument("--retry", action="store_true", help="try points again that failed before")
    parser.add_argument(
        "--vectorized",
        action="store_true",
        help="train points that differ only in seed or optimizer.peak_rate as one program",
    )
    slurm = parser.add_argument_group("what each job asks of Slurm")
    slurm.add_argument("--partition", metavar="NAME", help="default: the cluster's")
    slurm.add_argument("--gpus", type=count, metavar="N", help="default: none")
    slurm.add_argument("--cpus", type=count, metavar="N", help="default: the cluster's")
    slurm.add_argument("--memory", type=count, metavar="GB", help="default: the cluster's")
    slurm.add_argument("--minutes", type=count, metavar="N", help="time limit; default: a day")


def _run(options: argparse.Namespace, overrides: Overrides) -> int:
    given = [flag for flag in _SLURM_FLAGS if getattr(options, flag) is not None]
    if given and options.launcher != "slurm":
        raise UsageError(f"--{given[0]} is asked of Slurm: add --launcher=slurm, or leave it away")
    from headlab import sweeps

    plan = sweeps.plan(options.config, overrides)
    if options.dry_run:
        return _dry_run(plan, options.workdir)
    slurm = None
    if options.launcher == "slurm":
        slurm = sweeps.SlurmOptions(
            partition=options.partition,
            gpus=options.gpus,
            cpus=options.cpus,
            memory_gb=options.memory,
            **({} if options.minutes is None else {"minutes": options.minutes}),
        )
    statuses = sweeps.run(
        plan,
        options.workdir,
        jobs=options.jobs,
        retry=options.retry,
        slurm=slurm,
        vectorized=options.vectorized,
        command=["headlab", *sys.argv[1:]],
    )
    unfinished = [status for status in statuses if status.state != "finished"]
    for status in unfinished:
        print(
            f"{status.name} {status.state}: {status.error or 'run again to go on'}", file=sys.stderr
        )
    print(f"{sweeps.tally(statuses)}, of {len(statuses)} points: {options.workdir}")
    if unfinished:
        raise HeadlabError(
            f"{len(unfinished)} of {len(statuses)} points did not finish; logs and tracebacks are in "
            f"{options.workdir}/sweep. Once the cause is mended, the same command with --retry tries them again"
        )
    return 0


def _dry_run(plan: "Plan", workdir: str) -> int:
    from headlab import sweeps

    parameters = sweeps.parameters(plan.points)
    for status, number in zip(sweeps.statuses(plan, workdir), parameters, strict=True):
        known = (
            "parameters known once the corpus is read"
            if number is None
            else f"{number:,} parameters"
        )
        step = (
            f" at step {status.step:,} of {status.steps:,}" if status.state == "interrupted" else ""
        )
        why = f": {status.error}" if status.error else ""
        print(f"{status.name}  {known}  {status.state}{step}{why}")
    return 0


COMMAND = Command(
    name="sweep",
    help="train every point of a sweep file, or go on with a sweep",
    description="""
    Train every point of a sweep file. The same command goes on with a sweep that was interrupted,
    and trains the points that were added to it. Points that finished are kept.
    Any option that the points don't set is set for all of them by --config.KEY=VALUE.
    """,
    examples="""
    headlab sweep --config=configs/sweeps/tied_vs_untied.py:tiny --workdir=runs/tiny_sweep
    headlab sweep --config=configs/sweeps/head_zoo.py --workdir=runs/zoo --dry-run
    headlab sweep --config=configs/sweeps/head_zoo.py --workdir=runs/zoo --jobs=2
    headlab sweep --config=configs/sweeps/head_zoo.py --workdir=runs/zoo --launcher=slurm \\
        --jobs=8 --partition=gpu --gpus=1
    """,
    add_arguments=_add_arguments,
    run=_run,
    takes_overrides=True,
)
