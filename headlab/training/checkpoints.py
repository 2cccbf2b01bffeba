"""Checkpoints of a run in training: asynchronous, atomic, verified; the last few and the best.

They are written by Orbax; `headlab.checkpoint_files` says what lies in one.
"""

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from headlab import checkpoint_files as files
from headlab import processes
from headlab.errors import HeadlabError, UsageError

_DELETING = "deleting-"  # prefix of a checkpoint on its way out
_BAD = "bad-"  # prefix of a checkpoint moved aside


class Checkpoints:
    """The checkpoints of one run, for the one process that holds the run's lock.

    Attributes:
      bad: (step, reason) of each checkpoint that `restore` found damaged and moved aside.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int):
        """Open or make `directory`; keep the last `keep` (at least 1) checkpoints and the best one.

        What a killed process left unfinished there is removed.
        """
        if keep < 1:
            raise UsageError(
                f"checkpoint.keep={keep} keeps nothing to resume from; give at least 1"
            )
        self.directory = Path(directory).absolute()
        self.bad: list[tuple[int, str]] = []
        self._keep = keep
        self._writing: int | None = None
        self.directory.mkdir(parents=True, exist_ok=True)
        if processes.first():
            self._remove_unfinished()
        processes.barrier("unfinished checkpoints are removed")
        self._checkpointer = files.orbax().AsyncCheckpointer(files.composite_handler())

    def save(
        self,
        step: int,
        tree: Any,
        metadata: Mapping[str, Any],
        *,
        held_out: float | None = None,
        wait: bool = False,
    ) -> None:
        """Begin to save `tree` as the checkpoint of `step`; with `wait`, finish it too.

        The values are copied before this returns, so the caller may donate or overwrite the
        arrays. An earlier save is finished first, and its failure raised here.

        Args:
          step: the step, not yet saved.
          tree: a pytree of `jax.Array` or `numpy.ndarray`.
          metadata: a dictionary that JSON holds exactly.
          held_out: held-out loss at this step, nats a token; the lowest one is kept.
          wait: return when the checkpoint is on disk.

        Raises:
          UsageError: the step is saved already, or an argument is not as described.
          HeadlabError: this save or the one before failed; earlier checkpoints are intact.
        """
        self.wait()
        if step in self.all_steps():
            raise UsageError(f"step {step} is already saved in {self.directory}")
        if held_out is not None and not math.isfinite(held_out):
            raise UsageError(
                f"held_out={held_out}: give a finite loss, or None where there is none"
            )
        ocp = files.orbax()
        leaves = _on_host(files.named_leaves(tree))
        record = files.make_record(_exact_json(metadata), held_out, leaves)
        arguments = ocp.args.Composite(
            state=ocp.args.PyTreeSave(files.nested(leaves)), record=ocp.args.JsonSave(record)
        )
        self._writing = step
        try:
            self._checkpointer.save(self.directory / str(step), args=arguments)
        except Exception as problem:
            raise self._failure(problem) from problem
        if wait:
            self.wait()

    def wait(self) -> None:
        """Finish the save in progress, then remove the checkpoints that need not be kept.

        Raises:
          HeadlabError: the save failed; the message names its step and the last good checkpoint.
        """
        try:
            self._checkpointer.wait_until_finished()
        except Exception as problem:
            raise self._failure(problem) from problem
        if self._writing is not None:
            self._writing = None
            if processes.first():
                self._remove_old()
            processes.barrier("old checkpoints are removed")

    def close(self) -> None:
        """`wait`, and let go of the threads; call it always.

        Raises:
          HeadlabError: as `wait`.
        """
        try:
            self.wait()
        finally:
            self._checkpointer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except HeadlabError as problem:
            if error is None:
                raise
            error.add_note(str(problem))  # what went wrong first is what the caller must see

    def all_steps(self) -> list[int]:
        """The steps on disk, ascending; a save in progress counts when it is finished."""
        return list(files.saved_checkpoints(self.directory))

    def latest_step(self) -> int | None:
        """The last step on disk."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """The step on disk of the lowest held-out loss, the earliest of equals; None if unknown."""
        return files.best_checkpoint(self.directory)

    def restore(
        self, target: Any, step: int | None = None, *, vocab_size: int | None = None
    ) -> tuple[Any, dict[str, Any], int]:
        """(tree, metadata, step) of the latest good checkpoint, or of exactly `step`.

        Without `step`, a damaged checkpoint is passed over for the one before, entered in `bad`
        and renamed `bad-<step>`, so that its step can be saved again. If none is good, all are
        left as they are.

        Args:
          target: a pytree of arrays or `jax.ShapeDtypeStruct`, whose structure and shardings the
            result has; or a function that makes one for a step, where phases save other leaves.
          step: the step to restore; the latest good one where None.
          vocab_size: as in `headlab.checkpoint_files.read_checkpoint`.

        Raises:
          UsageError: there is no such step, or it holds other leaves than `target`.
          HeadlabError: no checkpoint, or not the one asked for, can be read.
        """
        self.wait()
        steps = self.all_steps()
        if step is not None:
            if step not in steps:
                raise UsageError(f"{self.directory} has no step {step}; it has {steps or 'none'}")
            try:
                tree, metadata = self._read(step, target, vocab_size)
            except files.CorruptCheckpoint as problem:
                raise HeadlabError(f"{problem}. Ask for another step: {steps}.") from problem
            return tree, metadata, step
        bad: list[tuple[int, str]] = []
        for candidate in reversed(steps):
            try:
                tree, metadata = self._read(candidate, target, vocab_size)
            except files.CorruptCheckpoint as problem:
                bad.append((candidate, str(problem)))
                continue
            self._set_aside(bad)
            return tree, metadata, candidate
        reasons = "; ".join(reason for _, reason in bad)
        raise HeadlabError(
            f"{self.directory} has no checkpoint that can be read"
            + (f": {reasons}. Restore one from a copy, or start a new run." if bad else ".")
        )

    def forget_after(self, step: int) -> None:
        """Remove the checkpoints of later steps."""
        self.wait()
        for later in self.all_steps():
            if later > step:
                self._remove(later)

    def _read(self, step: int, target: Any, vocab_size: int | None) -> tuple[Any, dict[str, Any]]:
        wanted = target(step) if callable(target) else target
        path = self.directory / str(step)
        return files.read_checkpoint(path, wanted, vocab_size=vocab_size)

    def _set_aside(self, bad: list[tuple[int, str]]) -> None:
        processes.barrier("all have read the checkpoints")
        for step, reason in bad:
            self.bad.append((step, reason))
            if not processes.first():
                continue
            aside = self.directory / f"{_BAD}{step}"
            while aside.exists():
                aside = aside.with_name(f"{aside.name}-again")
            (self.directory / str(step)).rename(aside)
        processes.barrier("damaged checkpoints are set aside")

    def _failure(self, problem: Exception) -> HeadlabError:
        step, self._writing = self._writing, None
        self._remove_unfinished()  # on a full disk, room for what is still to be written
        last = self.latest_step()
        intact = (
            "no earlier checkpoint exists" if last is None else f"step {last} is the last good one"
        )
        return HeadlabError(
            f"the checkpoint of step {step} could not be written to {self.directory} "
            f"({files.first_line(problem)}); {intact}. Free some space or correct the permissions, "
            "then run the same command again to resume."
        )

    def _remove_old(self) -> None:
        steps = self.all_steps()
        kept = {*steps[-self._keep :], self.best_step()}
        for step in steps:
            if step not in kept:
                self._remove(step)

    def _remove(self, step: int) -> None:
        # renamed first: a kill must not leave half a checkpoint under the name of a whole
        doomed = self.directory / f"{_DELETING}{step}"
        (self.directory / str(step)).rename(doomed)
        shutil.rmtree(doomed)

    def _remove_unfinished(self) -> None:
        for entry in self.directory.iterdir():
            if entry.name.startswith(_DELETING) or ".orbax-checkpoint-tmp" in entry.name:
                shutil.rmtree(entry, ignore_errors=True)


def _on_host(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Private copies in host memory; an array that spans processes stays, for Orbax to copy."""
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise UsageError(f"{name!r} is a {type(leaf).__name__}; only arrays can be saved")
        if leaf.size == 0:
            raise UsageError(f"{name!r} has shape {leaf.shape}; Orbax cannot save an empty array")
        if isinstance(leaf, jax.Array):
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
                raise UsageError(f"{name!r} is a typed key; save jax.random.key_data of it")
            if _is_here(leaf):
                leaf.copy_to_host_async()
    return {
        name: np.array(leaf, order="C") if _is_here(leaf) else leaf for name, leaf in leaves.items()
    }


def _is_here(leaf: Any) -> bool:
    """Whether this process can read the whole array."""
    return isinstance(leaf, np.ndarray) or leaf.is_fully_addressable or leaf.is_fully_replicated


def _exact_json(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        exact = json.loads(json.dumps(metadata, allow_nan=False)) == metadata
    except (TypeError, ValueError):
        exact = False
    if not exact:
        raise UsageError(f"metadata={metadata!r}: JSON cannot hold it exactly")
    return metadata
