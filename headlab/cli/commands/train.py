"""`headlab train`."""

import argparse

from headlab.cli.arguments import Command, Overrides, count, path
from headlab.errors import UsageError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=path, required=True, metavar="FILE", help="config file, FILE.py[:TEXT]"
    )
    parser.add_argument(
        "--workdir", type=path, required=True, metavar="DIR", help="the run directory"
    )
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="train with many processes, one command each; a cluster that JAX knows tells the rest",
    )
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="of process 0; default: $JAX_COORDINATOR_ADDRESS"
    )
    parser.add_argument("--processes", type=count, metavar="N", help="default: $JAX_NUM_PROCESSES")
    parser.add_argument(
        "--process-id", type=int, metavar="I", help="0 … N-1; default: $JAX_PROCESS_ID"
    )


def _run(options: argparse.Namespace, overrides: Overrides) -> int:
    from headlab.config import load

    # refused, if it must be, before training is imported
    config = load(options.config, overrides)
    given = (options.coordinator, options.processes, options.process_id)
    if not options.distributed and any(value is not None for value in given):
        raise UsageError(
            "--coordinator, --processes and --process-id are of training with many processes: add --distributed"
        )
    if options.distributed:
        from headlab import processes

        processes.start(*given)
    from headlab import training

    training.train(config, options.workdir)
    return 0


COMMAND = Command(
    name="train",
    help="train a model, or go on with a run that was interrupted",
    description="""
    Train a model. The same command goes on with a run that was interrupted.
    Any option of the config file is set by --config.KEY=VALUE.
    """,
    examples="""
    headlab train --config=configs/micro.py --workdir=runs/tied
    headlab train --config=configs/micro.py --config.head.name=untied --workdir=runs/untied
    headlab train --config=configs/micro.py --config.train.steps=100 \\
        --config.optimizer.clip_norm=none --workdir=runs/short
    """,
    add_arguments=_add_arguments,
    run=_run,
    takes_overrides=True,
)
