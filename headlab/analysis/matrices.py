"""The matrix of log-probabilities that a head gives to many contexts, block by block, in float64 throughout."""

import os
from collections.abc import Iterator
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from headlab.analysis.blocks import RowBlocks, rows_at_once
from headlab.analysis.states import held_out_states
from headlab.errors import UsageError
from headlab.heads import Head
from headlab.heads.float64 import log_probs_float64
from headlab.runs import RunDirectory


def log_prob_matrix(
    head_or_run: Head | RunDirectory | str | os.PathLike[str],
    contexts: Any,
    dtype: DTypeLike = np.float64,
    *,
    embedding: Any = None,
    kind: Literal["log_probs", "logits"] = "log_probs",
    split: str = "validation",
    step: int | Literal["last", "best"] = "last",
) -> RowBlocks:
    """log p(v | context) in nats, `[contexts, V]`: a row a context, a column a token by its id.

    In float64 every number that the head computes is float64, so that no rounding noise passes for rank: parameters are
    widened, and the map from h to log p is exact to about eps of float64. The states of a run are what its body made of
    the text in its own precision (float32 or bfloat16); they are one fixed matrix, whose rounding changes which
    contexts are looked at, not the rank that the head can give them. With another `dtype` the matrix is what the head
    computes in float32, rounded to it: for showing what rounding does, not for measuring rank.

    Args:
      head_or_run: a head, or the run directory of a trained model.
      contexts: of a head, its states h `[..., d_model]`; of a run, how many positions of the split, from the first on.
      embedding: of a head that ties to it.
      kind: "logits" gives log p + lse, what stands before the one softmax, without the normaliser's dimension; in
        float64 alone, and not of adaptive heads or mixtures of softmaxes.
      split, step: of a run: which text, and which checkpoint.

    Raises:
      UsageError: `kind` or `contexts` is out of its range, the head has no one softmax to give logits of, or those of
        `held_out_states`.
    """
    if kind not in ("log_probs", "logits"):
        raise UsageError(f"kind is {kind!r}; it must be 'log_probs' or 'logits'")
    if isinstance(head_or_run, Head):
        return _of_head(head_or_run, np.asarray(contexts), embedding, np.dtype(dtype), kind)
    if embedding is not None:
        raise UsageError("embedding is of a head; a run has its own")
    found = held_out_states(head_or_run, contexts, split=split, step=step)
    model = found.restored.model
    return _of_head(model.head, found.h, model.embedding, np.dtype(dtype), kind)


def _of_head(head: Head, h: np.ndarray, embedding: Any, dtype: np.dtype, kind: Any) -> RowBlocks:
    if not h.size or h.shape[-1] != head.d_model:
        raise UsageError(
            f"contexts are {list(h.shape)}; they must be states [..., {head.d_model}] of this head, at least one"
        )
    if kind == "logits" and dtype != np.float64:
        raise UsageError(f"logits are given in float64 alone, and dtype is {dtype}")
    flat = h.reshape(-1, h.shape[-1])
    step = min(rows_at_once(head.vocab_size), len(flat))

    def blocks() -> Iterator[np.ndarray]:
        for first in range(0, len(flat), step):
            part = flat[first : first + step]
            # all blocks of one shape, which compile once
            full = np.concatenate([part, np.repeat(part[-1:], step - len(part), axis=0)])
            if dtype == np.float64:
                rows = log_probs_float64(head, full, embedding, logits=kind == "logits")
            else:
                rows = head.log_probs(jnp.asarray(full), embedding=embedding, dtype=dtype)
            yield np.asarray(rows)[: len(part)]

    return RowBlocks(blocks, len(flat), head.vocab_size, kind, _caveats(head))


def _caveats(head: Head) -> tuple[str, ...]:
    if getattr(getattr(head, "spec", None), "logits_dtype", "float32") == "bfloat16":
        return ("the head trains with logits rounded to bfloat16; here they are not rounded",)
    return ()
