"""Hidden states of a trained model at held-out positions: the contexts that a run's head is measured on."""

import functools
import os
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from headlab import config as configs
from headlab.data import SPLITS, EvalBatches
from headlab.errors import UsageError
from headlab.pretrained import is_pretrained, restore
from headlab.runs import Restored, RunDirectory, dataset_of

_BATCH = 16


class HeldOut(NamedTuple):
    """A model, and what it made of the first positions of a split."""

    restored: Restored
    h: Float[np.ndarray, "positions d_model"]  # final hidden states, in the compute dtype
    inputs: Int[np.ndarray, "positions"]  # the token at each position
    targets: Int[np.ndarray, "positions"]  # the token after it


def held_out_states(
    run: RunDirectory | str | os.PathLike[str],
    contexts: int,
    *,
    split: str = "validation",
    step: int | Literal["last", "best"] = "last",
    corpus: str | None = None,
) -> HeldOut:
    """The final hidden states at the first `contexts` targets of a split, in the order of the evaluation.

    Windows are those of the evaluation: data.seq_len targets each, none overlapping another. `run` may be a Hugging
    Face folder, too; its text is `corpus`, by default headlab_english, in windows of 128 targets.

    Raises:
      UsageError: contexts is below 1 or above the split's targets; there is no such split, run or checkpoint; the
        corpus has changed since the run, or another is asked for.
    """
    if split not in SPLITS:
        raise UsageError(f"split is {split!r}; it must be one of {', '.join(SPLITS)}")
    if contexts < 1:
        raise UsageError(f"contexts is {contexts}; it must be at least 1")
    run = run if isinstance(run, RunDirectory) else RunDirectory(run)
    if corpus is not None and not is_pretrained(run.path):
        raise UsageError(
            f"{run.path} is a run, which has a corpus of its own: leave {corpus!r} out"
        )
    restored = restore(run.path, step)
    if corpus is not None:
        config = configs.replace(restored.config, {"data.corpus": corpus})
        restored = restored._replace(config=config)
    store = dataset_of(run, restored).store
    available = store.n_tokens(split) - 1
    if contexts > available:
        raise UsageError(
            f"contexts is {contexts}; the {split} split of {run.path} has {available} targets"
        )
    graph, state = nnx.split(restored.model)
    parts = []
    for batch in EvalBatches(store.tokens(split), restored.config.data.seq_len, _BATCH):
        h = np.asarray(_states(graph, state, batch.inputs))
        parts.append((h[batch.where], batch.inputs[batch.where], batch.targets[batch.where]))
        if sum(len(part[0]) for part in parts) >= contexts:
            break
    whole = (np.concatenate(part)[:contexts] for part in zip(*parts, strict=True))
    return HeldOut(restored, *whole)


def token_ids(ids: Any, name: str, positions: int, vocab_size: int) -> Int[np.ndarray, "positions"]:
    """The ids as a flat array; UsageError unless they are integers in [0, vocab_size), one a position."""
    array = np.asarray(ids).reshape(-1)
    if not np.issubdtype(array.dtype, np.integer):
        raise UsageError(f"{name} are of dtype {array.dtype}; token ids are integers")
    if len(array) != positions:
        raise UsageError(f"there are {len(array)} {name} and {positions} positions; give one each")
    wrong = np.flatnonzero((array < 0) | (array >= vocab_size))
    if len(wrong):
        raise UsageError(
            f"{name} has {array[wrong[0]]} at position {wrong[0]}; ids must be in [0, {vocab_size}). Leave positions "
            "out that don't count"
        )
    return array


@functools.partial(jax.jit, static_argnums=0)
def _states(graph, state, inputs):
    return nnx.merge(graph, state)(inputs)
