"""Claims about the numbers of a trained head: the rank of its log-probabilities, bfloat16, padding rows."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float

from experiments.claims.findings import Finding, between, interval, together, yes
from experiments.claims.runs import Context
from headlab import analysis
from headlab.heads import Head

RANK_CONTEXTS, CONTEXTS, DRAWS = 256, 2048, 51_200
NEAR_TIE = 0.05  # nats between the two best
ABOUT_A_HUNDREDTH = (10**-2.5, 10**-1.5)
HOT = 2.0


class Drawn(NamedTuple):
    """What sampling over all rows gave: draws of padding, of how many, and the probability of padding."""

    padding: int
    draws: int
    probability: float


def rank(context: Context) -> Finding:
    """The rank of each linear run, and of a mixture of softmaxes on the states of the first."""
    from flax import nnx

    from headlab import heads

    found, bound, mixture = {}, 0, 0
    for head in ("tied", "untied"):
        for seed, path in context.runs[head].items():
            held = context.held_out(path, RANK_CONTEXTS)
            model = held.restored.model
            found[f"{head},{seed}"] = rank_of(model.head, held.h, model.embedding)
            if not mixture:
                size = {"vocab_size": model.head.vocab_size, "d_model": model.head.d_model}
                mixed = heads.build("mixture_of_softmaxes", rngs=nnx.Rngs(0), n_experts=4, **size)
                bound, mixture = model.head.d_model + 1, rank_of(mixed, held.h)
    return rank_finding(found, bound, mixture)


def rank_of(head: Head, h: Float[np.ndarray, "contexts d"], embedding: Any = None) -> int:
    """The numerical rank of log P in float64."""
    return analysis.rank(analysis.log_prob_matrix(head, h, embedding=embedding)).rank


def rank_finding(ranks: Mapping[str, int], bound: int, mixture: int) -> Finding:
    """The verdict on ranks of linear heads beside d + 1, and that of a mixture."""
    most = max(ranks.values())
    found = f"at most {most} in {len(ranks)} runs (d + 1 = {bound}); the mixture {mixture}"
    figures = {"ranks": dict(ranks), "bound": bound, "mixture": mixture}
    return Finding(figures, yes(most <= bound < mixture), found)


def bfloat16(context: Context) -> Finding:
    """The tied runs' heads in bfloat16 beside the same in float64."""
    rounded = {"bfloat16": analysis.Variant(states="bfloat16", logits="bfloat16")}
    audits = {}
    for seed, path in context.runs["tied"].items():
        held = context.held_out(path, CONTEXTS)
        model = held.restored.model
        audits[seed] = analysis.compare_heads_numerically(
            held.h, model.head, rounded, embedding=model.embedding, near_tie=NEAR_TIE
        )["bfloat16"]
    return bfloat16_finding(audits)


def bfloat16_finding(audits: Mapping[int, analysis.Audit]) -> Finding:
    """The verdict on audits by seed. To first order |Δ log p| is the relative error of p."""
    error = interval({seed: audit.mean for seed, audit in audits.items()})
    flips = sum(audit.flips for audit in audits.values())
    near = sum(audit.near_tie_flips for audit in audits.values())
    positions = sum(audit.positions for audit in audits.values())
    verdicts = between(error, *ABOUT_A_HUNDREDTH), yes(flips > 0 and near >= 0.9 * flips)
    found = f"error {error.text('.1e')}; {flips} of {positions:,} most probable tokens flip, {near} among near-ties"
    figures = {"error": error, "flips": flips, "near_tie_flips": near, "positions": positions}
    return Finding(figures, together(verdicts), found)


def padding(context: Context) -> Finding:
    """Draws at a high temperature over all rows of the tied runs' heads, as they stand and as the head masks them."""
    unmasked, masked = {}, {}
    for seed, path in context.runs["tied"].items():
        held = context.held_out(path, CONTEXTS)
        model = held.restored.model
        bare, hidden = all_rows(model.head, held.h[:1024], model.embedding)
        unmasked[seed] = drawn(bare, model.head.vocab_size, HOT, DRAWS, seed)
        masked[seed] = drawn(hidden, model.head.vocab_size, HOT, DRAWS, seed)
    return padding_finding(unmasked, masked)


def all_rows(
    head: Head, h: Float[np.ndarray, "contexts d"], embedding: Any
) -> tuple[Float[Array, "contexts rows"], Float[Array, "contexts rows"]]:
    """(logits of every row as a plain product gives them, log-probabilities of every row as the head does)."""
    import jax.numpy as jnp

    states = jnp.asarray(h)
    weight: Any = (embedding if head.ties_to == "table" else head).weight[...]
    (segment,) = head.segments()
    norm = head.normalise(states, embedding)
    hidden, _ = head.log_prob_block(states, norm, segment, 0, segment.rows, embedding)
    return states @ weight.T, hidden


def drawn(
    scores: Float[Array, "contexts rows"], real: int, temperature: float, draws: int, seed: int
) -> Drawn:
    """Samples rows in proportion to exp(score / temperature), as often from each context.

    Rows from number `real` on are padding.
    """
    import jax

    scaled = scores / temperature
    share = jax.nn.softmax(scaled, axis=-1)[:, real:].sum(axis=-1).mean()
    rounds = -(-draws // len(scores))
    sample = jax.jit(jax.random.categorical)
    keys = jax.random.split(jax.random.key(seed), rounds)
    rows = np.stack([np.asarray(sample(key, scaled)) for key in keys])
    return Drawn(int((rows >= real).sum()), rows.size, float(share))


def padding_finding(unmasked: Mapping[int, Drawn], masked: Mapping[int, Drawn]) -> Finding:
    """The verdict on draws by seed."""
    verdict = yes(
        min(one.padding for one in unmasked.values()) > 0
        and max(one.padding for one in masked.values()) == 0
    )
    shares = [one.padding / one.draws for one in unmasked.values()]
    total = sum(one.draws for one in masked.values())
    found = (
        f"unmasked {min(shares):.2%} to {max(shares):.2%} of the draws are padding; masked "
        f"{sum(one.padding for one in masked.values())} of {total:,}"
    )
    return Finding({"unmasked": _by_seed(unmasked), "masked": _by_seed(masked)}, verdict, found)


def _by_seed(found: Mapping[int, Drawn]) -> Sequence[dict[str, Any]]:
    return [{"seed": seed, **one._asdict()} for seed, one in found.items()]
