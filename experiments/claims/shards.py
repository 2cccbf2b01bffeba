"""The log-probabilities of given tokens by one head on 1, 2, 4 and 8 shards of its rows, in either order of sums.

A process of its own, for the number of virtual CPU devices is set before JAX starts:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m experiments.claims.shards RUN STATES.npz OUT.npz
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from experiments.claims.runs import ROOT
from headlab.errors import HeadlabError

SHARDS = (1, 2, 4, 8)
ORDERS = ("fast", "invariant")
SUM_BLOCKS = 8
_DEVICES = "--xla_force_host_platform_device_count"

LogProbs = dict[tuple[str, int], Float[np.ndarray, "tokens"]]
"""By order and number of shards."""


def on_shards(
    run: Path, h: Float[np.ndarray, "tokens d"], targets: Int[np.ndarray, "tokens"], folder: Path
) -> LogProbs:
    """`log_probs` in a process of its own with eight virtual CPU devices; what it reads and gives stays in `folder`.

    Raises HeadlabError where the process fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    given, found = folder / "states.npz", folder / "log_probs.npz"
    np.savez(given, h=h, targets=targets)
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if _DEVICES not in flag]
    environment = {**os.environ, "XLA_FLAGS": " ".join([*flags, f"{_DEVICES}={max(SHARDS)}"])}
    environment["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, "-m", "experiments.claims.shards", *map(str, (run, given, found))]
    done = subprocess.run(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise HeadlabError(
            f"the process that shards the head ended with code {done.returncode}: "
            f"{done.stderr.strip().splitlines()[-1:] or 'it said nothing'}"
        )
    with np.load(found) as saved:
        return {(order, n): saved[f"{order}-{n}"] for order in ORDERS for n in SHARDS}


def log_probs(
    run: Path,
    h: Float[np.ndarray, "tokens d"],
    targets: Int[np.ndarray, "tokens"],
    shards: Sequence[int],
) -> LogProbs:
    """log p(target) in nats, float32, as each mesh and order gives it; needs as many devices as shards."""
    import jax
    import jax.numpy as jnp

    from headlab import models, sharding
    from headlab.runs import RunDirectory, restore_model

    model = restore_model(RunDirectory(run), shards=max(shards)).model
    found = {}
    for order in ORDERS:
        model.head.sum_in_blocks(SUM_BLOCKS if order == "invariant" else None)
        graph, params, constants = models.split(model)
        specs = sharding.param_specs(params)

        def body(params, h, targets, graph=graph, constants=constants):
            merged = models.merge(graph, params, constants)
            return merged.head.nll(h, targets, embedding=merged.embedding)

        for n in shards:
            mesh, everywhere = sharding.make_mesh(1, n), sharding.REPLICATED
            mapped = sharding.on_mesh(
                body, mesh, in_specs=(specs, everywhere, everywhere), out_specs=everywhere
            )
            arrays = sharding.place(params, mesh, specs), jnp.asarray(h), jnp.asarray(targets)
            found[order, n] = -np.asarray(jax.jit(mapped)(*arrays))
    return found


def main(arguments: Sequence[str]) -> None:
    """RUN STATES.npz OUT.npz: reads "h" and "targets", writes an array an order and number."""
    run, given, found = map(Path, arguments)
    with np.load(given) as saved:
        values = log_probs(run, saved["h"], saved["targets"], SHARDS)
    with open(found, "wb") as file:
        np.savez(file, **{f"{order}-{n}": value for (order, n), value in values.items()})


if __name__ == "__main__":
    main(sys.argv[1:])
