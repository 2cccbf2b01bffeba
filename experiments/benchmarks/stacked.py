"""Times the training step of runs that are stacked (`headlab sweep --vectorized`) beside that of one run alone.

    python -m experiments.benchmarks.stacked
    python -m experiments.benchmarks.stacked --config=configs/tiny.py --runs=8 --config.head.name=untied

Both steps are those that the trainer compiles, on batches drawn at random. n stacked runs do n times the work of one:
n is what to expect of a processor that one run fills, and less of one that it does not.
"""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console

from experiments.benchmarks.train_step import ROOT, draw_batches
from experiments.benchmarks.turns import (
    Turn,
    command_line,
    in_words,
    quartiles,
    ratios,
    take_turns,
    write,
)
from headlab import cli, sharding
from headlab.config import load
from headlab.runs import environment
from headlab.training.lanes import Alone, Lanes, Stacked
from headlab.training.stacking import check_stack
from headlab.training.step import make_phase, state_specs, train_step

MICRO = str(ROOT / "configs" / "micro.py")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark from a command line; the exit code is that of `headlab`."""
    return cli.guarded(_run, argv)


def _run(arguments: list[str]) -> int:
    arguments, overrides = cli.split_overrides(arguments)
    parser = command_line(
        "stacked", "Times the step of stacked runs beside one alone.", rounds=6, torch=False
    )
    parser.add_argument("--runs", type=cli.count, default=4, metavar="N", help="how many (4)")
    parser.add_argument("--config", default=MICRO, metavar="FILE", help="default: configs/micro.py")
    options = parser.parse_args(arguments)
    configs = [
        load(options.config, [*overrides, ("seed", str(seed))]) for seed in range(options.runs)
    ]
    found = benchmark(configs, options.rounds)
    for name, row in found["contestants"].items():
        Console().print(
            f"{name}: {in_words(row['ms'], 1)} ms a step, {in_words(row['over_alone'])} of one run alone"
        )
    write(found, options.output)
    return 0


def benchmark(configs: Sequence[Any], rounds: int) -> dict[str, Any]:
    """Times the step of the first of these resolved configs alone, and of all of them stacked.

    Returns:
      contestants: {"alone", "stacked": {"runs", "ms" (quartiles), "over_alone" (quartiles of the ratio of each round),
        "loss" of the first run's last step, nats a token}}, and the head, batch, rounds, machine and versions.

    Raises:
      UsageError: the runs cannot be stacked.
    """
    check_stack(configs)
    losses: dict[str, list[float]] = {"alone": [], "stacked": []}
    seconds = take_turns(
        {
            "alone": _steps(Alone(), configs[:1], losses["alone"]),
            "stacked": _steps(Stacked(configs), configs, losses["stacked"]),
        },
        rounds,
    )
    over = ratios(seconds, "alone")
    first = configs[0]
    return {
        "head": first.head.name,
        "batch": [first.train.batch_size, first.data.seq_len],
        "rounds": rounds,
        "contestants": {
            name: {
                "runs": runs,
                "ms": quartiles(1e3 * seconds[name]),
                "over_alone": over[name],
                "loss": losses[name][-1],
            }
            for name, runs in (("alone", 1), ("stacked", len(configs)))
        },
        "load_average": os.getloadavg(),
        "environment": environment(),
    }


def _steps(lanes: Lanes, configs: Sequence[Any], losses: list[float]) -> Turn:
    """A turn is one update of these runs; the loss of the first run before it is added to `losses`."""
    config = configs[0]
    vocab_size, mesh = config.data.vocab_size, sharding.make_mesh(1, 1)
    made = [
        make_phase(own, vocab_size, None, head_name=own.head.name, end=own.train.steps)
        for own in configs
    ]
    phase = made[0][0]
    state = lanes.join([own for _, own in made])
    specs = state_specs(phase, config, mesh, made[0][1])
    body = train_step(phase, config, mesh, specs, with_own=lanes.with_own)
    step = jax.jit(lanes.mapped(body), donate_argnums=0)

    def batch(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        inputs, targets = (ids[0] for ids in draw_batches(config, 1, seed))
        return inputs, targets, np.ones(inputs.shape, bool)

    batches = lanes.join([batch(own.seed) for own in configs])

    def turn() -> float:
        nonlocal state
        start = time.perf_counter()
        state, report = step(state, batches)
        jax.block_until_ready(state)
        taken = time.perf_counter() - start
        first = lanes.split(report)[0]
        losses.append(float(first["nats"] / first["weight"]))
        return taken

    return turn


if __name__ == "__main__":
    sys.exit(main())
