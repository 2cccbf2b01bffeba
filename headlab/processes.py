"""Many processes as one program: how they find each other, what each reads, and what one alone writes.

All processes run the same steps on one mesh over the devices of all. A process that dies takes the others with it: its
neighbours see the connection break, or miss its heartbeat for `TIMEOUT` seconds, and stop with an error.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from headlab.errors import UsageError

#: seconds without a heartbeat after which a process counts as dead
TIMEOUT = 60

_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def start(
    coordinator: str | None = None,
    count: int | None = None,
    process_id: int | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Joins the other processes; before anything else uses a device.

    Args:
        coordinator: "host:port" of process 0, where all can reach it. None: $JAX_COORDINATOR_ADDRESS, or what Slurm,
            Open MPI, Kubernetes or a TPU slice tells.
        count, process_id: how many processes there are, and which this is, from 0; None: $JAX_NUM_PROCESSES and
            $JAX_PROCESS_ID, or as above.

    Raises:
        UsageError: some of the three are missing and no cluster tells them, or they do not fit each other.
    """
    address, number, own = (environ.get(name) for name in _VARIABLES)
    coordinator = coordinator or address
    count = _integer(number, _VARIABLES[1]) if count is None else count
    process_id = _integer(own, _VARIABLES[2]) if process_id is None else process_id
    if coordinator is not None and ":" not in coordinator:
        raise UsageError(
            f"the coordinator is {coordinator!r}; it must be HOST:PORT, such as node0:1234"
        )
    if count is not None and count < 1:
        raise UsageError(f"the number of processes is {count}; it must be at least 1")
    if process_id is not None and not 0 <= process_id < (count or process_id + 1):
        raise UsageError(
            f"the process id is {process_id}; it must be in 0 … {(count or 1) - 1}, one for each process"
        )
    try:
        jax.distributed.initialize(
            coordinator,
            count,
            process_id,
            heartbeat_timeout_seconds=TIMEOUT,
            initialization_timeout=5 * TIMEOUT,
            shutdown_timeout_seconds=TIMEOUT,
        )
    except (ValueError, RuntimeError) as problem:
        given = dict(coordinator=coordinator, processes=count, process_id=process_id)
        raise UsageError(
            f"the processes did not find each other ({str(problem).splitlines()[0]}); given were {given}. Give "
            "--coordinator=HOST:PORT, --processes=N and --process-id=I to each, or start them by Slurm, Open MPI or "
            "another launcher that JAX knows."
        ) from problem


def _integer(text: str | None, name: str) -> int | None:
    if text is None:
        return None
    if not text.isdecimal():
        raise UsageError(f"${name} is {text!r}; it must be an integer, 0 or more")
    return int(text)


def many() -> bool:
    """Whether there is more than one process."""
    return jax.process_count() > 1


def first() -> bool:
    """Whether this is the process that writes what is written once."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Returns when all processes have come here."""
    if many():
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def any_says(flag: bool) -> bool:
    """Whether `flag` is true in any process; all must ask."""
    if not many():
        return flag
    from jax.experimental import multihost_utils

    return bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def spread(
    read: Callable[[slice], Sequence[np.ndarray]], length: int, mesh: Mesh, spec: PartitionSpec
) -> tuple[Any, ...]:
    """Arrays of `length` rows on the mesh, of which each process reads the rows of its own devices alone.

    `read(rows)` gives the arrays' parts. One process gets plain arrays of all rows.
    """
    if not many():
        return tuple(read(slice(0, length)))
    parts: dict[tuple[int, int], Sequence[np.ndarray]] = {}

    def rows_of(index) -> Sequence[np.ndarray]:
        start, stop, _ = index[0].indices(length)
        if (start, stop) not in parts:
            parts[start, stop] = read(slice(start, stop))
        return parts[start, stop]

    sharding = NamedSharding(mesh, spec)
    own = sharding.addressable_devices_indices_map((length,))
    shapes = [part.shape[1:] for part in rows_of(next(iter(own.values())))]

    def array(number: int, shape: tuple[int, ...]) -> jax.Array:
        return jax.make_array_from_callback(
            (length, *shape), sharding, lambda index: rows_of(index)[number]
        )

    return tuple(array(number, shape) for number, shape in enumerate(shapes))
