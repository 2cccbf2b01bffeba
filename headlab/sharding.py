"""The device mesh and the one wrapper that puts a function on it.

The axes are `data` (the batch) and `vocab` (rows of the vocabulary, of size 1 for now: every parameter is replicated).
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from headlab.errors import UsageError

#: parameters and optimizer state: a copy on every device
REPLICATED = PartitionSpec()
#: a batch: its leading axis over `data`
BY_BATCH = PartitionSpec("data")


def make_mesh(data: int) -> Mesh:
    """The mesh `data` × 1 over the first devices; one device takes the same path as many.

    Raises UsageError where there are too few devices.
    """
    available = jax.device_count()
    if not 1 <= data <= available:
        raise UsageError(
            f"mesh.data is {data}, and there are {available} devices ({jax.default_backend()}); "
            f"it must be in 1 … {available}. On a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=N makes N."
        )
    return jax.make_mesh(
        (data, 1), ("data", "vocab"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:data]
    )


def on_mesh(function: Callable, mesh: Mesh, *, in_specs: Any, out_specs: Any) -> Callable:
    """`function` as the body that runs on each device of the mesh, its replication claims checked."""
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True
    )


def place(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """The arrays of `tree` on the devices of the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, spec))


def abstract(tree: Any, mesh: Mesh, spec: PartitionSpec = REPLICATED) -> Any:
    """Shapes and dtypes of `tree` with their sharding on the mesh: what a checkpoint is restored into."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
