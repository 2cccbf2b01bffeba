"""The run directory: its files, the model that it holds, and where it was made.

It knows no training loop: `headlab.training` writes what is read here.
"""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from ml_collections import ConfigDict

from headlab import models
from headlab.checkpoint_files import (
    best_checkpoint,
    read_checkpoint,
    saved_checkpoints,
)
from headlab.data import Dataset, Tokenizer, open_dataset
from headlab.errors import UsageError
from headlab.run_files import RunDirectory, RunLocked, phase_at, phases_of

__all__ = [
    "Restored",
    "RunDirectory",
    "RunLocked",
    "dataset_of",
    "environment",
    "phase_at",
    "phases_of",
    "restore_model",
    "rounding",
]

_PACKAGES = (
    "headlab",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
)


class Restored(NamedTuple):
    """A model as a checkpoint of a run holds it."""

    model: models.Decoder
    head: str  # the name of the head that it has at this step
    tokenizer: Tokenizer
    config: ConfigDict
    step: int | None  # None: not of a run


def restore_model(
    run: RunDirectory, step: int | Literal["last", "best"] = "last", *, shards: int = 1
) -> Restored:
    """The model of the last checkpoint, of the one with the best held-out loss, or of a given step.

    Its rows of the vocabulary are padded for so many shards, whatever mesh it was trained on.

    Raises:
      UsageError: there is no run, or no such checkpoint.
      HeadlabError: the checkpoint is damaged.
    """
    config = run.config()
    steps = list(saved_checkpoints(run.checkpoints_dir))
    wanted: int | None = max(steps, default=None)
    if step != "last":
        wanted = best_checkpoint(run.checkpoints_dir) if step == "best" else step
    if wanted is None or wanted not in steps:
        raise UsageError(
            f"{run.path} has no checkpoint {step!r}; it has the steps {steps or 'none'}. "
            "Train it with `headlab train`."
        )
    tokenizer = Tokenizer(run.tokenizer_path.read_text(), str(run.tokenizer_path))
    path = run.checkpoints_dir / str(wanted)
    head, _ = phases_of(config)[phase_at(config, wanted)]
    size = tokenizer.vocab_size
    model = models.build(config, size, head_name=head, shards=shards)
    graph, params, constants = models.split(model)
    params, _ = read_checkpoint(path, params, under="params", vocab_size=size)
    if constants:
        constants, _ = read_checkpoint(path, constants, under="constants")
    return Restored(models.merge(graph, params, constants), head, tokenizer, config, wanted)


def dataset_of(run: RunDirectory, restored: Restored) -> Dataset:
    """The corpus that a run was trained on, with its tokens.

    Raises UsageError where the corpus, or its tokenizer, has changed since; and the errors of `data.open_dataset`.
    """
    dataset = open_dataset(restored.config.data)
    if dataset.tokenizer.fingerprint != restored.tokenizer.fingerprint:
        raise UsageError(
            f"the tokenizer of {restored.config.data.corpus} is not the one that {run.path} was trained with: the "
            "corpus or the tokenizer file has changed since. Go on with the original one."
        )
    return dataset


def environment() -> dict[str, Any]:
    """Versions, devices and the git commit of the source, for result.json.

    `cores` are the processor cores that this process may use: XLA shares sums on a CPU out among them, so that float32
    rounds otherwise on another number.

    `git` is None when the source is not in a git repository; `dirty` says whether files there
    differ from the commit.
    """
    device = jax.devices()[0]
    return {
        "versions": {"python": platform.python_version()}
        | {package: _version(package) for package in _PACKAGES},
        "platform": platform.platform(),
        "backend": device.platform,
        "device_kind": device.device_kind,
        "device_count": jax.device_count(),
        "cores": _cores(),
        "git": _git_state(Path(__file__)),
    }


def rounding() -> dict[str, Any]:
    """What the last bits of a run's numbers depend on, beside its config: versions, the device, on a CPU its cores."""
    device = jax.devices()[0]
    found: dict[str, Any] = {
        package: _version(package) for package in ("headlab", "jax", "jaxlib", "flax", "optax")
    }
    found |= {"backend": device.platform, "device_kind": device.device_kind}
    return found | ({"cores": _cores()} if device.platform == "cpu" else {})


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state(source: Path) -> dict[str, Any] | None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(source.parent), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()

    try:
        # a package installed inside somebody else's repository is not a part of it
        git("ls-files", "--error-unmatch", source.name)
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
