"""The device mesh, where each parameter lives on it, and the one wrapper that puts a function on it.

The axes are `data` (the batch; with fsdp the body, too) and `vocab` (rows of the vocabulary). One device is the mesh
1 × 1 and takes the same path as many.
"""

import fnmatch
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from headlab.errors import UsageError
from headlab.ops.shards import VOCAB

DATA = "data"
#: a copy on every device
REPLICATED = PartitionSpec()
#: a batch: its leading axis over `data`
BY_BATCH = PartitionSpec(DATA)
#: rows of the vocabulary: the leading axis over `vocab`
BY_ROWS = PartitionSpec(VOCAB)

# Where each parameter lives, by its path in the model. These are sharded by rows over `vocab`; the rest is replicated,
# or with fsdp, where it is of the body, sharded over `data`.
_BY_ROWS = (
    "embedding/weight",
    "embedding/bands/*/weight",
    "head/weight",
    "head/bias",
    "head/tails/*/weight",
    "head/frequent/*",
    "head/rest/*",
    "head/gate/*",
)
_BODY = ("blocks/*", "final_norm/*")


def mesh_shape(data: int, vocab: int, devices: int) -> tuple[int, int]:
    """(data, vocab) with −1 replaced by what the other leaves of so many devices.

    Raises UsageError, naming a mesh that would do, where the devices do not make this mesh.

    >>> mesh_shape(-1, 2, 8)
    (4, 2)
    """
    known = max(data, 1) * max(vocab, 1)
    if data == vocab == -1:
        problem = "one of the two must be a number"
    elif -1 in (data, vocab):
        if devices % known == 0:
            return (devices // known, vocab) if data == -1 else (data, devices // known)
        problem = f"{known} does not divide the devices"
    elif data < 1 or vocab < 1:
        problem = "each must be at least 1, or -1 for the rest of the devices"
    elif known > devices:
        problem = f"it needs {known} devices"
    else:
        return data, vocab
    fitting = math.gcd(max(vocab, 1), devices)
    raise UsageError(
        f"the mesh is mesh.data={data} by mesh.vocab={vocab}, and there are {devices} devices "
        f"({jax.default_backend()}): {problem}. mesh.data={devices // fitting} and mesh.vocab={fitting} would do. On a "
        "CPU, XLA_FLAGS=--xla_force_host_platform_device_count=N makes N devices."
    )


def make_mesh(data: int, vocab: int = 1) -> Mesh:
    """The mesh `data` × `vocab` over the first devices; −1 stands for the rest of them.

    Raises UsageError where the devices do not make this mesh.
    """
    shape = mesh_shape(data, vocab, jax.device_count())
    if jax.process_count() > 1 and math.prod(shape) != jax.device_count():
        raise UsageError(
            f"the mesh is mesh.data={shape[0]} by mesh.vocab={shape[1]}, and {jax.process_count()} processes have "
            f"{jax.device_count()} devices: many processes must use all of them. Set one of the two to -1."
        )
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, (DATA, VOCAB), axis_types=(AxisType.Auto,) * 2, devices=devices)


def is_rows(path: str) -> bool:
    """Whether the leaf at a path such as "head/weight" or "opt_state/1/mu/head/weight" holds rows of the vocabulary.

    >>> is_rows("params/head/tails/0/weight"), is_rows("params/head/tails/0/kernel")
    (True, False)
    """
    return any(fnmatch.fnmatch(path, p) or fnmatch.fnmatch(path, f"*/{p}") for p in _BY_ROWS)


def param_specs(params: Any, mesh: Mesh | None = None, *, fsdp: bool = False) -> Any:
    """Where each parameter of a model lives: a tree like `params` of PartitionSpecs; `fsdp` needs the mesh."""

    def spec(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if is_rows(name):
            return BY_ROWS
        if fsdp and mesh is not None and any(fnmatch.fnmatch(name, p) for p in _BODY):
            return _over_data(leaf.shape, mesh.shape[DATA])
        return REPLICATED

    return jax.tree_util.tree_map_with_path(spec, params)


def _over_data(shape: tuple[int, ...], devices: int) -> PartitionSpec:
    """The longest axis that the devices divide over `data`; a copy on each where there is none."""
    fitting = [axis for axis, size in enumerate(shape) if size % devices == 0]
    if not fitting:
        return REPLICATED
    chosen = max(fitting, key=lambda axis: shape[axis])
    return PartitionSpec(*(DATA if axis == chosen else None for axis in range(chosen + 1)))


def optimizer_specs(optimizer: Any, opt_state: Any, specs: Any) -> Any:
    """Where the optimizer's state lives: what it holds of a parameter as the parameter, the rest as copies."""
    return optax.tree_map_params(
        optimizer, lambda _, spec: spec, opt_state, specs, transform_non_params=lambda _: REPLICATED
    )


def data_axis(spec: PartitionSpec) -> int | None:
    """The axis of an array that is sharded over `data`, if one is."""
    return next((axis for axis, name in enumerate(spec) if name == DATA), None)


def on_mesh(function: Callable, mesh: Mesh, *, in_specs: Any, out_specs: Any) -> Callable:
    """`function` as the body that runs on each device of the mesh, its replication claims checked."""
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True
    )


def place(tree: Any, mesh: Mesh, specs: Any) -> Any:
    """The arrays of `tree` on the devices of the mesh; `specs` is one PartitionSpec or a tree of them."""

    def put(spec, part):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: _placed(x, sharding), part)

    return jax.tree.map(put, specs, tree, is_leaf=_is_spec)


def _placed(x: Any, sharding: NamedSharding) -> jax.Array:
    if sharding.is_fully_addressable or getattr(x, "sharding", None) == sharding:
        return jax.device_put(x, sharding)
    # Each process has the whole array and puts the parts of its own devices there.
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def abstract(tree: Any, mesh: Mesh, specs: Any = REPLICATED) -> Any:
    """Shapes and dtypes of `tree` with their shardings on the mesh: what a checkpoint is restored into."""

    def shaped(spec, part):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part
        )

    return jax.tree.map(shaped, specs, tree, is_leaf=_is_spec)


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)
