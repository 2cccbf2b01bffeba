"""What theorems say of the rank of a head's log-probabilities, and whether random parameters keep to it."""

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import nnx

from headlab import sharding
from headlab.analysis.matrices import log_prob_matrix
from headlab.analysis.ranks import Rank, rank
from headlab.embeddings import Constant
from headlab.errors import UsageError
from headlab.heads import Head


@dataclasses.dataclass(frozen=True)
class Theory:
    """The theorem on a head: rank(log P) ≤ `bound`, or None: nothing below the vocabulary's size is promised."""

    bound: int | None
    reason: str
    vocab_size: int


@dataclasses.dataclass(frozen=True)
class BoundCheck:
    """A measured rank beside its theorem.

    Attributes:
      theory, measured: what is compared.
      expected: the rank that generic parameters reach with enough contexts: the bound, or V where there is none; no
        more than there are contexts.
      verdict: "equal"; "below": fewer directions than the theorem allows, which breaks nothing; "broken": more than
        it allows, which no exact arithmetic gives.
      explanation: the verdict in words.
    """

    theory: Theory
    measured: Rank
    expected: int
    verdict: str
    explanation: str


def theory(head: Head) -> Theory:
    """The bound on the rank of `head`'s log-probability matrix over any contexts, and its reason in words.

    >>> from flax import nnx
    >>> from headlab import heads
    >>> known = theory(heads.build("untied", vocab_size=100, d_model=16, bias=True, rngs=nnx.Rngs(0)))
    >>> known.bound  # d + 2
    18
    """
    return Theory(head.rank_bound(), head.rank_reason(), head.vocab_size)


def check_bound(
    head: Head,
    *,
    embedding: Any = None,
    contexts: int | None = None,
    scale: float = 1.0,
    seed: int = 0,
) -> BoundCheck:
    """The rank of `head` on random states with random parameters, in float64, beside the theorem.

    States are standard normal. A copy of the head (and of the embedding) is given parameters drawn anew, normal with
    standard deviation `scale`/√width: rows of tokens by the width of the row, kernels by their inputs, biases by 1. At
    scale 1 logits have a spread of about 1 nat, and generic parameters show the whole rank. Smaller scales bend a
    mixture less: its further singular values fall below the tolerance, and the verdict is "below".

    Args:
      contexts: number of states; None is V + 32. With no more than the expected rank, only a lower bound is seen.
      scale: above 0 and finite.

    Raises:
      UsageError: contexts or scale is out of its range.
    """
    if contexts is not None and contexts < 1:
        raise UsageError(f"contexts is {contexts}; it must be at least 1")
    if not 0 < scale < float("inf"):
        raise UsageError(f"scale is {scale}; it must be positive and finite")
    rng = np.random.default_rng(seed)
    drawn = _drawn(head, "head", rng, scale)
    drawn_embedding = None if embedding is None else _drawn(embedding, "embedding", rng, scale)
    h = rng.standard_normal((contexts or head.vocab_size + 32, head.d_model))
    measured = rank(log_prob_matrix(drawn, h, embedding=drawn_embedding))
    known = theory(head)
    expected = min(known.bound or head.vocab_size, len(h))
    return BoundCheck(known, measured, expected, *_verdict(known, measured.rank, expected, scale))


def _verdict(known: Theory, found: int, expected: int, scale: float) -> tuple[str, str]:
    bound = f"the bound {known.bound}" if known.bound else f"V = {known.vocab_size}, for no bound,"
    if found == expected:
        few = "" if expected in (known.bound, known.vocab_size) else ", as many as contexts"
        return "equal", f"{found} directions{few}; {bound} is what generic parameters reach"
    if found < expected:
        return (
            "below",
            f"{found} directions in place of {expected}: at parameters of scale {scale} the rest are below the "
            "tolerance. The theorem bounds the rank from above; that it is reached needs enough scale and contexts",
        )
    return (
        "broken",
        f"{found} directions where {bound} is the most: rounding in the head's own arithmetic, or a wrong bound",
    )


def _drawn(module: Any, name: str, rng: np.random.Generator, scale: float) -> Any:
    """A copy of the module with every parameter drawn anew."""
    graph, *states = nnx.split(module, nnx.Param, Constant)
    params, constants = states

    def draw(path, leaf):
        if leaf.ndim < 2:
            spread = scale
        else:
            by_row = sharding.is_rows(
                f"{name}/{jax.tree_util.keystr(path, simple=True, separator='/')}"
            )
            spread = scale / leaf.shape[-1 if by_row else 0] ** 0.5
        return (rng.standard_normal(leaf.shape) * spread).astype(leaf.dtype)

    pure = jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(params))
    return nnx.merge(graph, nnx.State(pure), constants)
