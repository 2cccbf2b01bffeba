"""Log-probabilities of given text, with what else the distribution says at each token."""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from headlab import sharding
from headlab.data.progress import track
from headlab.errors import HeadlabError, UsageError
from headlab.ops import TokenReport
from headlab.ops.shards import VOCAB
from headlab.scoring.windows import Packed, cut, default_stride, pack


class TokenScore(NamedTuple):
    """One token of a text; all but `id` None where nothing stands before it. Log-probabilities are in nats."""

    id: int
    log_prob: float | None = None
    rank: int | None = None  # 1 + tokens more probable, or as probable and of a lower id
    entropy: float | None = None  # of the distribution that it was drawn from, nats
    lse: float | None = None  # its log-partition; None, too, where it is not one softmax
    top: tuple[tuple[int, float], ...] | None = (
        None  # (id, log-probability), the most probable first
    )
    context: int | None = None  # how many tokens before it the model saw


def score(
    model: Any,
    tokens: Sequence[Sequence[int]],
    *,
    top: int = 0,
    prefix: Sequence[int] | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    mesh: Mesh | None = None,
    progress: bool = False,
) -> list[list[TokenScore]]:
    """log p(token | the tokens before it in its text) of every token of every text, in nats, and more.

    A token depends on what stands before it alone: not on the other texts, nor on `batch_size`, beyond the rounding of
    float32. The head makes one pass over the vocabulary for linear heads and two for others, and never holds `[T, V]`
    (`Head.token_report`). Texts are padded to powers of two, so that few programs are compiled.

    Texts longer than the model's `max_length` are scored in windows of `max_length` tokens that begin every `stride`
    tokens; each token is scored once, by the first window that reaches it, after at least
    `max_length − stride + 1` tokens (all that there are at the beginning). `context` says after how many. A smaller
    stride gives more context and takes more time.

    Args:
      model: `model(ids)` gives hidden states; it has `head`, `embedding` and `max_length`.
      tokens: ids of each text, at least one a text.
      top: how many of the most probable tokens are listed, 0 … V.
      prefix: ids put before each text, such as the tokenizer's separator. Without one, nothing predicts a text's first
        token, whose numbers are None. In a long text the prefix leaves the window like any other token.
      stride: in 1 … max_length; None is half of it, rounded up.
      batch_size: windows at once, at least 1; a multiple of the mesh's `data`.
      mesh: of `headlab.sharding.make_mesh`: rows of the vocabulary are shared over `vocab`, windows over `data`; None
        is one device. Another number of shards rounds otherwise, but for `head.sum_order=invariant` with `data` 1: all
        scores then have the same bits on 1, 2, 4 and 8 shards.
      progress: shows how many windows are done and the time left, on a terminal.

    Raises:
      UsageError: a text is empty or has an id outside the vocabulary, a number is out of its range, or the mesh's
        `vocab` does not divide the model's rows.
      HeadlabError: a log-probability is NaN.

    >>> from headlab import models
    >>> from headlab.config import default_config, resolve
    >>> config = default_config()
    >>> config.model.update(d_model=8, n_layers=1, n_heads=2, d_mlp=16, max_length=12)
    >>> config.data.seq_len = 12
    >>> [[first, second]] = score(models.build(resolve(config), 11), [[3, 5]])
    >>> first.log_prob, math.isclose(second.log_prob, -math.log(11), rel_tol=0.05)  # not trained yet
    (None, True)
    """
    before = checked_ids(prefix or (), "the prefix", model.head.vocab_size)
    texts = [checked_ids(text, f"text {i}", model.head.vocab_size) for i, text in enumerate(tokens)]
    for number, text in enumerate(texts):
        if not len(text):
            raise UsageError(f"text {number} is empty; a text to be scored has at least one token")
    sequences = [np.concatenate([before, text]) for text in texts]
    found = score_sequences(
        model,
        sequences,
        [max(len(before), 1)] * len(texts),
        top=top,
        stride=stride,
        batch_size=batch_size,
        mesh=mesh,
        progress=progress,
    )
    unscored = 0 if len(before) else 1
    return [
        [*(TokenScore(int(id_)) for id_ in text[:unscored]), *scored]
        for text, scored in zip(texts, found, strict=True)
    ]


def total_log_prob(scores: Sequence[TokenScore]) -> float:
    """Σ log p of the tokens that have one, in nats, summed exactly and rounded once to float64.

    >>> total_log_prob([TokenScore(3), TokenScore(5, -0.5), TokenScore(1, -1.25)])
    -1.75
    """
    return math.fsum(token.log_prob for token in scores if token.log_prob is not None)


def score_sequences(
    model: Any,
    sequences: Sequence[np.ndarray],
    first: Sequence[int],
    *,
    top: int = 0,
    stride: int | None = None,
    batch_size: int = 8,
    mesh: Mesh | None = None,
    progress: bool = False,
) -> list[list[TokenScore]]:
    """The scores of each sequence's tokens from number `first` ≥ 1 on; see `score`, which checks the ids."""
    longest, vocab_size = model.max_length, model.head.vocab_size
    stride = default_stride(longest) if stride is None else operator.index(stride)
    if not 1 <= stride <= longest:
        raise UsageError(
            f"stride is {stride}; it must be in 1 … {longest}, the longest sequence of the model"
        )
    if operator.index(batch_size) < 1:
        raise UsageError(f"batch_size is {batch_size}; it must be at least 1")
    if not 0 <= operator.index(top) <= vocab_size:
        raise UsageError(f"top is {top}; it must be in 0 … {vocab_size}, the vocabulary's size")
    windows = [
        window
        for i, (sequence, start) in enumerate(zip(sequences, first, strict=True))
        for window in cut(i, len(sequence), start, longest, stride)
    ]
    mesh = sharding.make_mesh(1, 1) if mesh is None else mesh
    devices = mesh.shape[sharding.DATA]
    if batch_size % devices:
        raise UsageError(
            f"batch_size is {batch_size}; it must be a multiple of {devices}, the data axis of the mesh"
        )
    graph, variables = _on_mesh(model, mesh)
    scores: list[list[TokenScore]] = [[] for _ in sequences]
    packed = list(pack(sequences, windows, longest, batch_size, stride, devices=devices))
    for part in track(packed, "scoring", total=len(packed), enabled=progress):
        report = _report(graph, mesh, variables, part.inputs, part.targets, part.skipped, top)
        report = jax.device_get(report)
        for row, window in enumerate(part.windows):
            scores[window.sequence] += _read(report, row, window, part, sequences)
    return scores


def _on_mesh(model: Any, mesh: Mesh) -> tuple[Any, Any]:
    """(the model's graph, its parameters as a nested dict and what else it holds, both on the mesh)."""
    graph, *states = nnx.split(model, nnx.Param, ...)
    params, rest, shards = nnx.to_pure_dict(states[0]), states[1], mesh.shape[VOCAB]
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if sharding.is_rows(name) and leaf.shape[0] % shards:
            raise UsageError(
                f"{name} has {leaf.shape[0]} rows, which {shards} shards of the vocabulary do not divide; restore the "
                f"model with shards={shards}, which pads them"
            )
    placed = sharding.place(params, mesh, sharding.param_specs(params))
    return graph, (placed, sharding.place(rest, mesh, sharding.REPLICATED))


@functools.partial(jax.jit, static_argnums=(0, 1, 5, 6))
def _report(graph, mesh: Mesh, variables, inputs, targets, skipped: int, top: int) -> TokenReport:
    def body(variables, inputs, targets):
        params, rest = variables
        model = nnx.merge(graph, nnx.State(params), rest)
        h = model(inputs)[:, skipped:]
        return model.head.token_report(h, targets, top, embedding=model.embedding)

    batch = sharding.BY_BATCH
    specs = (sharding.param_specs(variables[0]), sharding.REPLICATED)
    scored = sharding.on_mesh(body, mesh, in_specs=(specs, batch, batch), out_specs=batch)
    return scored(variables, inputs, targets)


def _read(report: TokenReport, row: int, window, part: Packed, sequences) -> list[TokenScore]:
    """The scores of one window's tokens."""
    ids = sequences[window.sequence]
    scores = []
    for place in range(window.first, window.stop):
        column = place - window.start - 1 - part.skipped
        log_prob = float(report.log_prob[row, column])
        if np.isnan(log_prob):
            raise HeadlabError(
                f"the log-probability of token {place} of sequence {window.sequence} is NaN: the model's parameters "
                "are not finite. Score with an earlier checkpoint."
            )
        best = zip(
            report.top_ids[row, column].tolist(),
            report.top_log_probs[row, column].tolist(),
            strict=True,
        )
        scores.append(
            TokenScore(
                int(ids[place]),
                log_prob,
                int(report.rank[row, column]),
                float(report.entropy[row, column]),
                None if report.lse is None else float(report.lse[row, column]),
                tuple(best),
                place - window.start,
            )
        )
    return scores


def checked_ids(tokens: Sequence[int], what: str, vocab_size: int) -> np.ndarray:
    """The ids as an array; UsageError where one is outside [0, vocab_size)."""
    ids = np.array([operator.index(id_) for id_ in tokens], np.int64)
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise UsageError(
            f"{what} has the id {wrong[0]}; ids must be in [0, {vocab_size}), the model's vocabulary"
        )
    return ids
