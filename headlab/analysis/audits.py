"""Numerical audits: what precision, blocks and shards change in a head's answers; whether a model repeats itself."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from scipy.special import expit

from headlab import sharding
from headlab.analysis.states import token_ids
from headlab.embeddings import Constant
from headlab.errors import UsageError
from headlab.heads import Head
from headlab.heads.float64 import log_probs_float64


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to compute the same log-probabilities.

    Attributes:
      states: the dtype that h is rounded to first. logits: what products are rounded to; None leaves the head's own.
      block_rows: rows of one block; None chooses by size.
      shards: over so many devices rows of the vocabulary are spread; 1 is none.
    """

    states: str = "float32"
    logits: str | None = None
    block_rows: int | None = None
    shards: int = 1


DEFAULT_VARIANTS = {
    "float32": Variant(),
    "bfloat16 logits": Variant(logits="bfloat16"),
    "bfloat16 states": Variant(states="bfloat16"),
    "blocks of 128": Variant(block_rows=128),
}


@dataclasses.dataclass(frozen=True)
class Audit:
    """A variant beside the same head in float64.

    Attributes:
      flips: positions whose most probable token differs. positions: of how many.
      near_ties: positions whose two best are within `near_tie` nats of one another in float64; near_tie_flips: flips
        among them.
      largest, mean: of |Δ log p|, nats, over all positions and tokens.
      choice: the two tokens a, b of the two-way choice "p(a) / (p(a) + p(b)) > threshold"; choices_changed: how often
        it came out otherwise; largest_share_change: of that share.
    """

    variant: Variant
    positions: int
    flips: int
    near_ties: int
    near_tie_flips: int
    largest: float
    mean: float
    choice: tuple[int, int]
    choices_changed: int
    largest_share_change: float


@dataclasses.dataclass(frozen=True)
class SelfRepetition:
    """The probability that a model gives to "the next token is this token", beside how often it is.

    Attributes:
      mass: mean p(next = this). rate: share of positions where it is so in the data. excess: mass − rate.
    """

    mass: float
    rate: float
    excess: float
    positions: int


def compare_heads_numerically(
    h: Float[Array, "positions d_model"],
    head: Head,
    variants: Mapping[str, Variant] = DEFAULT_VARIANTS,
    *,
    embedding: Any = None,
    near_tie: float = 0.01,
    choice: tuple[int, int] | None = None,
    threshold: float = 0.5,
) -> dict[str, Audit]:
    """Each variant of a head beside the same head in float64, on the same states.

    Args:
      near_tie: nats between the two best, below which an argmax may turn on rounding.
      choice: two tokens; None takes the two with the highest mean log-probability in float64.
      threshold: of their two-way choice, in (0, 1).

    Raises:
      UsageError: a number is out of its range, rows do not divide over the shards, or devices are missing.
    """
    if not near_tie >= 0:
        raise UsageError(f"near_tie is {near_tie}; it must be 0 or more nats")
    if not 0 < threshold < 1:
        raise UsageError(f"threshold is {threshold}; it must be in (0, 1)")
    exact = log_probs_float64(head, h, embedding).reshape(-1, head.vocab_size)
    if choice is None:
        a, b = np.argsort(-exact.mean(axis=0), kind="stable")[:2]
        choice = int(a), int(b)
    if len(set(choice)) != 2 or not all(0 <= token < head.vocab_size for token in choice):
        raise UsageError(
            f"choice is {choice}; it must be two different ids in 0 … {head.vocab_size - 1}"
        )
    best = np.argmax(exact, axis=1)
    two = np.partition(exact, -2, axis=1)[:, -2:]
    near = two[:, 1] - two[:, 0] <= near_tie
    share = _share(exact, choice)
    found = {}
    for name, variant in variants.items():
        values = _computed(head, embedding, jnp.asarray(h), variant)
        difference = np.abs(values - exact)
        flipped = np.argmax(values, axis=1) != best
        changed = _share(values, choice)
        found[name] = Audit(
            variant=variant,
            positions=len(exact),
            flips=int(flipped.sum()),
            near_ties=int(near.sum()),
            near_tie_flips=int((flipped & near).sum()),
            largest=float(difference.max()),
            mean=float(difference.mean()),
            choice=choice,
            choices_changed=int(np.sum((changed > threshold) != (share > threshold))),
            largest_share_change=float(np.abs(changed - share).max()),
        )
    return found


def self_repetition(
    head: Head,
    h: Float[Array, "positions d_model"],
    inputs: Int[Array, "positions"],
    targets: Int[Array, "positions"],
    *,
    embedding: Any = None,
) -> SelfRepetition:
    """How much a model expects each token to follow itself: tied heads lean to it, for h is near its own input's row.

    Args:
      inputs: the token at each position. targets: the token after it.

    Raises:
      UsageError: there is no position, or inputs or targets aren't one id of the vocabulary a position.
    """
    h = jnp.asarray(h).reshape(-1, head.d_model)
    if not len(h):
        raise UsageError("there are no positions; a mean needs at least 1")
    given, after = (
        token_ids(ids, name, len(h), head.vocab_size)
        for name, ids in (("inputs", inputs), ("targets", targets))
    )
    same = given == after
    nll = head.nll(h, jnp.asarray(given, jnp.int32), embedding=embedding)
    mass, rate = float(np.exp(-np.asarray(nll, np.float64)).mean()), float(same.mean())
    return SelfRepetition(mass, rate, mass - rate, same.size)


def _share(log_probs: np.ndarray, choice: tuple[int, int]) -> np.ndarray:
    """p(a) / (p(a) + p(b))."""
    return expit(log_probs[:, choice[0]] - log_probs[:, choice[1]])


def _computed(head: Head, embedding: Any, h: Array, variant: Variant) -> np.ndarray:
    """The log-probabilities of one variant as float64 numbers, [positions, V]."""
    changed: Any = nnx.merge(*nnx.split(head))  # a copy: the caller's head stays as it is
    spec = changed.spec
    if variant.logits is not None:
        if variant.logits not in ("float32", "bfloat16"):
            raise UsageError(f"logits is {variant.logits!r}; it must be 'float32' or 'bfloat16'")
        spec = spec._replace(logits_dtype=variant.logits)
    if variant.block_rows is not None:
        if variant.block_rows < 1:
            raise UsageError(f"block_rows is {variant.block_rows}; it must be at least 1")
        spec = spec._replace(vocab_block=variant.block_rows)
        changed.block_rows = variant.block_rows
    changed.spec = spec
    for segment in changed.segments():
        if variant.shards < 1 or segment.rows % variant.shards:
            raise UsageError(
                f"shards is {variant.shards}; it must divide the {segment.rows} rows of {segment.name}: "
                "choose another number, or a head.vocab_multiple of it"
            )
    graphs, params, constants = zip(
        *(nnx.split(module, nnx.Param, Constant) for module in (changed, embedding)), strict=True
    )

    def body(params, constants, h):
        own, table = map(nnx.merge, graphs, params, constants)
        return own.log_probs(h.astype(variant.states), embedding=table)

    mesh, everywhere = sharding.make_mesh(1, variant.shards), sharding.REPLICATED
    specs = _specs(params)
    mapped = sharding.on_mesh(
        body, mesh, in_specs=(specs, everywhere, everywhere), out_specs=everywhere
    )
    arrays = (
        sharding.place(params, mesh, specs),
        sharding.place(constants, mesh, everywhere),
        sharding.place(h.reshape(-1, head.d_model), mesh, everywhere),
    )
    return np.asarray(jax.jit(mapped)(*arrays)).astype(np.float64)


def _specs(params: tuple[Any, Any]) -> Any:
    """Where the parameters of (head, embedding) live on a mesh: a tree like `params`."""
    leaves = []
    for name, part in zip(("head", "embedding"), params, strict=True):
        leaves += jax.tree.leaves(sharding.param_specs({name: nnx.to_pure_dict(part)}))
    return jax.tree.unflatten(jax.tree.structure(params), leaves)
