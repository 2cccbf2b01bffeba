"""The files of a checkpoint: an Orbax tree of arrays, and a record by which each byte is verified.

Directories are `<checkpoints>/<step>/`, with `state` (the arrays) and `record` (JSON) in them.
"""

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import absl.logging
import jax
import jax.numpy as jnp
import numpy as np

from headlab.errors import HeadlabError, UsageError
from headlab.sharding import is_rows

_SHOWN = 8  # paths that an error lists of each kind


class CorruptCheckpoint(HeadlabError):
    """A checkpoint that cannot be read, or whose content is not what was saved."""


def saved_checkpoints(directory: str | os.PathLike[str]) -> dict[int, float | None]:
    """Held-out loss (nats a token, None where unknown) of each checkpoint by step, ascending."""
    held_out: dict[int, float | None] = {}
    folder = Path(directory)
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    for step in sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name):
        try:
            held_out[step] = read_record(folder / str(step))["held_out"]
        except CorruptCheckpoint:
            held_out[step] = None
    return held_out


def best_checkpoint(directory: str | os.PathLike[str]) -> int | None:
    """The step of the lowest held-out loss, the earliest of equals; None when none is known."""
    known = {step: loss for step, loss in saved_checkpoints(directory).items() if loss is not None}
    return min(known, key=known.__getitem__) if known else None


def read_checkpoint(
    path: str | os.PathLike[str], target: Any, *, under: str = "", vocab_size: int | None = None
) -> tuple[Any, dict[str, Any]]:
    """(tree, metadata) of the checkpoint in the directory `path`, every byte of it verified.

    Args:
      path: the directory of one step.
      target: a pytree of arrays or `jax.ShapeDtypeStruct`. Its leaves are restored with its
        structure and shardings (the default device where a leaf has none), whatever mesh they
        were saved from.
      under: read only the part of the checkpoint at this path, such as "params".
      vocab_size: the number of real tokens. Given, arrays of rows of the vocabulary (see
        `headlab.sharding.is_rows`) may have another padding in `target` than in the checkpoint,
        and rows of zeros are added or taken away; None: their shapes must agree.

    Raises:
      UsageError: the leaves saved are not those of `target`, in name, shape and dtype, or they
        are of another vocabulary.
      CorruptCheckpoint: the files are damaged or incomplete.
    """
    record = read_record(path)
    prefix = f"{under}/" if under else ""
    saved = {name: leaf for name, leaf in record["leaves"].items() if name.startswith(prefix)}
    wanted = {prefix + name: leaf for name, leaf in named_leaves(target).items()}
    _check_vocabulary(path, record["metadata"], vocab_size)
    _check_structure(path, saved, wanted, padded=vocab_size is not None)
    host = _read_arrays(Path(path).absolute(), saved)  # Orbax refuses a relative path
    leaves = [
        _place(_with_rows(path, name, host.pop(name), leaf.shape), leaf)
        for name, leaf in wanted.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(target), leaves), record["metadata"]


def read_record(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a checkpoint says of itself: `held_out`, `metadata`, `leaves` (shape, dtype, SHA-256).

    Raises:
      CorruptCheckpoint: the record is missing or not as it was written.
    """
    file = Path(path) / "record" / "metadata"
    try:
        record = json.loads(file.read_bytes())
        seal = record.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as problem:
        raise CorruptCheckpoint(f"{file} cannot be read ({problem!r})") from None
    if seal != _seal(record):
        raise CorruptCheckpoint(f"{file} is not as it was written")
    return record


def array_digest(array: np.ndarray) -> str:
    """SHA-256 of the values of an array in row-major order."""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by path, such as "params/body/0/mlp/weight".

    Raises:
      UsageError: a key holds "/", or two leaves have the same path.
    """
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in named or name.count("/") != len(path) - 1:
            raise UsageError(
                f"the path {name!r} is not unique or has a key with '/'; rename the key"
            )
        named[name] = leaf
    return named


def nested(named: Mapping[str, Any]) -> dict[str, Any]:
    """The dictionary of dictionaries in which the leaves of `named_leaves` lie in a checkpoint.

    >>> nested({"params/w": 1, "params/b": 2, "step": 3})
    {'params': {'w': 1, 'b': 2}, 'step': 3}
    """
    tree: dict[str, Any] = {}
    for name, leaf in named.items():
        *folders, last = name.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = leaf
    return tree


def make_record(
    metadata: Mapping[str, Any], held_out: float | None, named: Mapping[str, Any]
) -> dict[str, Any]:
    """The sealed record of a checkpoint with these leaves; one that this process cannot see whole
    has no digest.
    """
    record = {
        "metadata": metadata,
        "held_out": held_out,
        "leaves": {
            name: {
                "shape": list(leaf.shape),
                "dtype": str(leaf.dtype),
                "sha256": array_digest(leaf) if isinstance(leaf, np.ndarray) else None,
            }
            for name, leaf in named.items()
        },
    }
    return record | {"sha256": _seal(record)}


@functools.cache
def orbax() -> ModuleType:
    """The module orbax.checkpoint, imported when first needed (it is slow), its log silenced.

    Orbax logs each step of its work, and failures with their traceback; all failures that matter
    reach the caller as exceptions.
    """
    logger = absl.logging.get_absl_logger()
    logger.addFilter(lambda entry: "orbax" not in Path(entry.pathname).parts)
    import orbax.checkpoint as ocp

    return ocp


def composite_handler() -> Any:
    """The Orbax handler of a checkpoint directory.

    Uncompressed: noise-like weights shrink by 8%, and compressing them takes a core as long as
    writing them.
    """
    ocp = orbax()
    return ocp.CompositeCheckpointHandler(
        state=ocp.PyTreeCheckpointHandler(use_compression=False),
        record=ocp.JsonCheckpointHandler(),
    )


def _read_arrays(path: Path, saved: Mapping[str, Mapping[str, Any]]) -> dict[str, np.ndarray]:
    ocp = orbax()
    blank = {
        name: jax.ShapeDtypeStruct(leaf["shape"], jnp.dtype(leaf["dtype"]))
        for name, leaf in saved.items()
    }
    as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in saved}
    request = ocp.args.PyTreeRestore(
        nested(blank), restore_args=nested(as_numpy), partial_restore=True
    )
    try:
        _read_storage(path / "state")
        with ocp.Checkpointer(composite_handler()) as reader:
            restored = reader.restore(path, args=ocp.args.Composite(state=request))["state"]
    except MemoryError:  # says nothing of the files
        raise
    except Exception as problem:  # Orbax and its storage raise many kinds
        raise CorruptCheckpoint(f"{path} cannot be read ({first_line(problem)})") from problem
    arrays = named_leaves(restored)
    for name, leaf in saved.items():
        array = arrays[name]
        intact = str(array.dtype) == leaf["dtype"] and list(array.shape) == leaf["shape"]
        if not intact or leaf["sha256"] not in (None, array_digest(array)):
            raise CorruptCheckpoint(f"{path}: the values of {name!r} are not those that were saved")
    return arrays


def _read_storage(state: Path) -> None:
    """Read all that is stored, in order, so that damage is one error here.

    Orbax reads all arrays at the same time: the first error closes its event loop on the others,
    whose tracebacks then go to standard error.
    """
    import tensorstore

    base = {"driver": "file", "path": f"{state}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    keys = store.list().result()
    if not keys:
        raise ValueError(f"{state} holds no arrays")
    for key in keys:
        store.read(key).result()


def _place(host: np.ndarray, target: Any) -> jax.Array:
    sharding = getattr(target, "sharding", None)
    if sharding is None:
        return jnp.array(host)
    # a copy for each shard: on CPU a device may use the memory it is given, and donate it later
    return jax.make_array_from_callback(host.shape, sharding, lambda index: np.array(host[index]))


def _with_rows(path: Any, name: str, host: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The array with as many rows as wanted: rows of zeros are added, or taken away."""
    if host.shape == tuple(shape):
        return host
    rows = shape[0]
    if np.any(host[rows:]):
        raise UsageError(
            f"checkpoint {path}: {name!r} has {host.shape[0]} rows, and of those beyond the {rows} wanted some are "
            "not padding: it is of a larger vocabulary."
        )
    more = [(0, max(rows - host.shape[0], 0)), *((0, 0) for _ in shape[1:])]
    return np.pad(host[:rows], more)


def _check_vocabulary(path: Any, metadata: Mapping[str, Any], vocab_size: int | None) -> None:
    saved = metadata.get("vocab_size", vocab_size)
    if None not in (saved, vocab_size) and saved != vocab_size:
        raise UsageError(
            f"checkpoint {path} is of a vocabulary of {saved} tokens, not of {vocab_size}. Restore it with the "
            "tokenizer that it was trained with."
        )


def _check_structure(
    path: str | os.PathLike[str],
    saved: Mapping[str, Mapping[str, Any]],
    wanted: Mapping[str, Any],
    *,
    padded: bool = False,
) -> None:
    differing = []
    for name in sorted(saved.keys() & wanted.keys()):
        first = 1 if padded and is_rows(name) else 0  # the axis from which shapes must agree
        one = f"{saved[name]['dtype']}{saved[name]['shape']}"
        other = f"{wanted[name].dtype}{list(wanted[name].shape)}"
        same_dtype = saved[name]["dtype"] == str(wanted[name].dtype)
        if not same_dtype or saved[name]["shape"][first:] != list(wanted[name].shape)[first:]:
            differing.append(f"{name} ({one} saved, {other} wanted)")
    findings = {
        "not in the checkpoint": sorted(wanted.keys() - saved.keys()),
        "in the checkpoint alone": sorted(saved.keys() - wanted.keys()),
        "of another shape or dtype": differing,
    }
    found = [f"{kind}: {_listed(names)}" for kind, names in findings.items() if names]
    if found:
        raise UsageError(
            f"checkpoint {path} is of another model or optimizer: {'; '.join(found)}. Restore it "
            "with the configuration that it was saved with."
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def first_line(problem: BaseException) -> str:
    return (str(problem).strip().splitlines() or [repr(problem)])[0][:200]


def _seal(record: Mapping[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
