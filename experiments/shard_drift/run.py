"""Trains one model on 1, 2, 4 and 8 shards of the vocabulary, in either order of sums, and compares every bit.

    python -m experiments.shard_drift.run
    python -m experiments.shard_drift.run --steps=50 --shards=1 --shards=4 --config.head.name=tied

Each training is written down when it is done; the same command goes on where an earlier one was stopped. The devices
are virtual ones of this CPU, unless XLA_FLAGS says otherwise.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headlab import cli
from headlab.errors import UsageError

DEVICES = "--xla_force_host_platform_device_count"
if DEVICES not in os.environ.get("XLA_FLAGS", ""):  # read when JAX starts its devices
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}=8".strip()

ROOT = Path(__file__).parents[2]
SHARDS = (1, 2, 4, 8)
ORDERS = ("fast", "invariant")
SCORED = 1000  # tokens
HEAD = (("head.name", "untied"),)
# The trained model is micro, but for one block of its four and shorter batches: what is asked is the same.
SHORTER = (("model.n_layers", "1"), ("train.batch_size", "4"), ("data.seq_len", "64"))


_COMPILED: dict[str, Any] = {}  # the step of each config that this process has trained


class Trained(NamedTuple):
    """What is compared of a training."""

    params: dict[str, Any]  # real rows alone, by path
    losses: list[float]  # nats a token of every step
    log_probs: Any  # [SCORED] of the given next tokens
    best: Any  # [SCORED] most probable tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the experiment from a command line; the exit code is that of `headlab`."""
    return cli.guarded(_run, argv)


def _run(arguments: list[str]) -> int:
    arguments, overrides = cli.split_overrides(arguments)
    options = _parser().parse_args(arguments)
    for key in ("head.sum_order", "mesh.vocab", "mesh.data", "train.steps"):
        if key in dict(overrides):
            raise UsageError(f"--config.{key} is set by the experiment; see --help")
    found = compare(
        options.config,
        overrides,
        tuple(options.shards or SHARDS),
        options.steps,
        options.rounds,
        Path(options.workdir),
    )
    _print(found)
    path = Path(options.workdir) / "drift.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")
    return 0


def compare(
    config_file: str,
    overrides: Sequence[tuple[str, str]],
    shards: Sequence[int],
    steps: int,
    rounds: int,
    workdir: Path,
) -> dict[str, Any]:
    """Trains in each order of sums on each number of shards, and measures against the first number.

    Returns:
      drift: a row an order and number: "order", "shards", "same_bits" (of all parameters, logged losses and scored
      log-probabilities), "parameters" (largest difference), "losses" (largest difference, nats a token), "log_probs"
      (largest, nats, of 1,000 tokens) and "flips" (of their most probable tokens). time: for each number the time of
      a step in the invariant order over one in the fast, as quartiles over `rounds` in turns; whole_time: that of the
      config file's own model and batches, which are not made shorter. And the settings.
    """
    from headlab.config import load

    def all_configs(chosen: Sequence[tuple[str, str]]) -> dict[Any, Any]:
        return {
            (order, n): load(
                config_file,
                [
                    *chosen,
                    *overrides,
                    ("train.steps", str(steps)),
                    ("head.sum_order", order),
                    ("mesh.vocab", str(n)),
                ],
            )
            for order in ORDERS
            for n in shards
        }

    configs, whole = all_configs([*HEAD, *SHORTER]), all_configs(HEAD)
    from headlab.runs import environment

    workdir.mkdir(parents=True, exist_ok=True)
    drift, trained = [], {}
    for (order, n), config in configs.items():
        trained[order, n] = _trained(config, workdir / f"{order}-{n}")
        if config.log.progress:
            print(f"{order} order on {n} shards: done", file=sys.stderr)
        row = _difference(trained[order, shards[0]], trained[order, n])
        drift.append({"order": order, "shards": n, **row})
    return {
        "drift": drift,
        "time": _times(configs, shards, rounds),
        "whole_time": _times(whole, shards, rounds),
        "steps": steps,
        "rounds": rounds,
        "head": configs[ORDERS[0], shards[0]].head.name,
        "seed": configs[ORDERS[0], shards[0]].seed,
        "environment": environment(),
    }


# --- training ----------------------------------------------------------------------------------------------------


def _trained(config: Any, path: Path) -> Trained:
    """The training of a config, read where it was written down before."""
    import numpy as np

    from headlab.config import config_hash

    file = path.with_suffix(".npz")
    key = config_hash(config)
    if file.exists():
        with np.load(file) as saved:
            if str(saved["config"]) == key:
                params = {
                    name.removeprefix("params/"): saved[name]
                    for name in saved.files
                    if name.startswith("params/")
                }
                losses = saved["losses"].tolist()
                return Trained(params, losses, saved["log_probs"], saved["best"])
    found = _train(config)
    arrays = {f"params/{name}": value for name, value in found.params.items()}
    temporary = path.with_suffix(".new.npz")
    np.savez(
        temporary,
        config=key,
        losses=np.array(found.losses),
        log_probs=found.log_probs,
        best=found.best,
        **arrays,
    )
    os.replace(temporary, file)
    return found


def _train(config: Any) -> Trained:
    """Trains on drawn tokens, whose successors depend on them, and scores others of the same kind."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec

    from headlab import models, sharding
    from headlab.sharding import DATA
    from headlab.training.optimizer import paths
    from headlab.training.step import nll_step

    state, step, mesh, specs, phase = _step(config)
    losses = []
    for number in range(config.train.steps):
        state, report = step(state, _batch(config, number))
        losses.append(float(report["nats"]) / float(report["weight"]))
    length = config.data.seq_len
    rows = -(-SCORED // length)
    inputs, targets, _ = _batch(config, -1, rows)
    everything = np.ones(inputs.shape, bool)
    variables = (state.params, state.constants)
    nll = jax.jit(nll_step(phase.graph, mesh, specs.params))
    log_probs = -np.asarray(nll(variables, (inputs, targets, everything))).reshape(-1)[:SCORED]

    def best(variables, inputs):
        model = models.merge(phase.graph, *variables)
        return model.head.top_k(model(inputs), 1, embedding=model.embedding)[1][..., 0]

    top = sharding.on_mesh(
        best,
        mesh,
        in_specs=((specs.params, sharding.REPLICATED), sharding.BY_BATCH),
        out_specs=PartitionSpec(DATA),
    )
    ids = np.asarray(jax.jit(top)(variables, jnp.asarray(inputs))).reshape(-1)[:SCORED]
    names, values = jax.tree.leaves(paths(state.params)), jax.tree.leaves(state.params)
    size = config.data.vocab_size
    params = {
        name: np.asarray(value)[:size] if sharding.is_rows(name) else np.asarray(value)
        for name, value in zip(names, values, strict=True)
    }
    return Trained(params, losses, log_probs, ids)


def _step(config: Any):
    """(fresh state, compiled step, mesh, specs, phase), as the trainer makes them."""
    import jax
    import numpy as np

    from headlab import sharding
    from headlab.config import to_json
    from headlab.training.step import make_phase, state_specs, train_step

    mesh = sharding.make_mesh(1, config.mesh.vocab)
    size = config.data.vocab_size
    counts = np.arange(size, 0, -1)
    phase, state = make_phase(
        config,
        size,
        counts,
        head_name=config.head.name,
        end=config.train.steps,
        shards=config.mesh.vocab,
    )
    specs = state_specs(phase, config, mesh, state)
    state = sharding.place(state, mesh, specs)
    key = to_json(config)
    if key not in _COMPILED:
        step = jax.jit(train_step(phase, config, mesh, specs), donate_argnums=0)
        _COMPILED[key] = step.lower(state, _batch(config, 0)).compile()
    return state, _COMPILED[key], mesh, specs, phase


def _batch(config: Any, number: int, rows: int | None = None):
    """(inputs, targets, where) of a stream in which each token says much of the next, Zipf-distributed."""
    import numpy as np

    rng = np.random.default_rng([config.seed, number + 1])
    rows, length, size = (
        rows or config.train.batch_size,
        config.data.seq_len,
        config.data.vocab_size,
    )
    fresh = np.minimum(rng.zipf(1.3, (rows, length + 1)) - 1, size - 1)
    tokens = fresh.copy()
    for place in range(1, length + 1):
        follows = rng.random(rows) < 0.7
        tokens[:, place] = np.where(
            follows, (tokens[:, place - 1] * 31 + 7) % size, fresh[:, place]
        )
    tokens = tokens.astype(np.int32)
    return tokens[:, :-1], tokens[:, 1:], np.ones((rows, length), bool)


# --- comparing ---------------------------------------------------------------------------------------------------


def _difference(one: Trained, other: Trained) -> dict[str, Any]:
    import numpy as np

    def largest(a, b) -> float:
        return float(np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))))

    same = one.losses == other.losses and np.array_equal(one.log_probs, other.log_probs)
    same = same and all(np.array_equal(one.params[k], other.params[k]) for k in one.params)
    return {
        "same_bits": bool(same),
        "parameters": max(largest(one.params[k], other.params[k]) for k in one.params),
        "losses": largest(one.losses, other.losses),
        "log_probs": largest(one.log_probs, other.log_probs),
        "flips": int(np.sum(one.best != other.best)),
        "digest": _digest(other),
    }


def _digest(trained: Trained) -> str:
    """SHA-256 of all parameters, so that runs of other machines can be compared."""
    found = hashlib.sha256()
    for name in sorted(trained.params):
        found.update(name.encode())
        found.update(trained.params[name].tobytes())
    return found.hexdigest()[:16]


def _times(
    configs: Mapping[Any, Any], shards: Sequence[int], rounds: int
) -> dict[str, list[float]]:
    """Quartiles over rounds of the time of a step in the invariant order over one in the fast, by number of shards."""
    from experiments.benchmarks.turns import ratios, take_turns, timed

    found = {}
    for n in shards:
        turns = {}
        for order in ORDERS:
            config = configs[order, n]
            state, step, *_ = _step(config)
            turns[order] = timed(_Kept(state, step, _batch(config, 0)))
        found[str(n)] = ratios(take_turns(turns, rounds), "fast")["invariant"]
    return found


class _Kept:
    """A step that gives its state to itself."""

    def __init__(self, state: Any, step: Any, batch: Any):
        self._state, self._step, self._batch = state, step, batch

    def __call__(self) -> Any:
        self._state, report = self._step(self._state, self._batch)
        return self._state.step, report


def _print(found: Mapping[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from experiments.benchmarks.turns import in_words

    table = Table(
        title=f"{found['head']} head, {found['steps']} steps, against one shard",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        caption="time: median of a step in the invariant order over the fast on the same mesh, quartiles in brackets; "
        "whole: of the config's own model and batches",
    )
    for column in ("order", "shards", "same bits"):
        table.add_column(column)
    for column in ("parameters", "losses", "log p", "argmax flips", "time over fast", "whole"):
        table.add_column(column, justify="right")
    for row in found["drift"]:
        times = [found[key][str(row["shards"])] for key in ("time", "whole_time")]
        table.add_row(
            row["order"],
            str(row["shards"]),
            "yes" if row["same_bits"] else "no",
            *(f"{row[key]:.1e}" for key in ("parameters", "losses", "log_probs")),
            f"{row['flips']} of {SCORED:,}",
            *(in_words(time) if row["order"] == "invariant" else "" for time in times),
        )
    Console().print(table)


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m experiments.shard_drift.run",
        description="Compares trainings on 1, 2, 4 and 8 shards of the vocabulary, bit by bit.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", default=str(ROOT / "configs" / "micro.py"), metavar="FILE")
    parser.add_argument(
        "--config.KEY", dest="override", metavar="VALUE", help="set one option of the config"
    )
    parser.add_argument("--steps", type=cli.count, default=200, help="default: 200")
    parser.add_argument(
        "--shards",
        type=cli.count,
        action="append",
        metavar="N",
        help="a number of shards, given once or more; the first is compared with (default: 1, 2, 4 and 8)",
    )
    parser.add_argument("--rounds", type=cli.count, default=20, help="turns of each step (20)")
    parser.add_argument("--workdir", default="runs/shard_drift", metavar="DIR")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


if __name__ == "__main__":
    sys.exit(main())
