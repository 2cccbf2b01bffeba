"""The claims: what is said, by whom, how it is tested here, and the rule of its verdict, fixed before it was run."""

from collections.abc import Sequence
from typing import NamedTuple

from headlab.errors import UsageError, nearest

OFTEN = "often said, of no one source"


class Claim(NamedTuple):
    """One row of the table."""

    name: str
    says: str
    source: str
    size: str  # of what is run
    rule: str  # that makes the verdict of the figures
    measure: str  # MODULE.FUNCTION in this folder, of a `Context`
    weight: float  # about the CPU seconds it takes, for the time left
    trains: bool = False  # whether it needs the trained runs


_GEMMA = "Gemma 2 2B's shape (Gemma Team 2024)"
_RUNS = "3 seeds of each trained model"

CLAIMS = (
    Claim(
        "micro_size",
        "micro has 1,852,544 parameters tied and 2,901,120 untied, 57% more",
        "headlab's README",
        "configs/micro.py, whole",
        "holds if both counts are exact and the rest rounds to 57%",
        "arithmetic.micro_size",
        4,
    ),
    Claim(
        "head_blocks",
        "At Gemma 2 2B's shape the head costs as much as about ten blocks",
        OFTEN,
        _GEMMA,
        "within 10% of ten, by a block's own matrices and by 2·d·V over 24·d²; depends if the two differ",
        "arithmetic.head_blocks",
        0.1,
    ),
    Claim(
        "head_bytes",
        "There the head is a quarter of the bytes that a decode step reads",
        OFTEN,
        f"{_GEMMA}, bfloat16, 1,024 tokens of context",
        "within 10% of 25%, by weights alone and with keys and values; depends if the two differ",
        "arithmetic.head_bytes",
        0.1,
    ),
    Claim(
        "decode_size",
        "A 2B model does not decode in proportion to its size",
        "often said; the roofline of Pope et al. 2022",
        "Gemma 2 2B beside Llama 2 7B, an H100's roofline, batch 1, bfloat16, 1,024 tokens of context",
        "holds if the ratio of times is more than 10% off the ratio of sizes, by parameters outside the embedding and "
        "by all; depends if the two differ",
        "arithmetic.decode_size",
        0.1,
    ),
    Claim(
        "rank",
        "Log-probabilities of a linear head of width d have rank d + 1 at most",
        "Yang et al. 2018",
        "tied and untied, 3 seeds each, d = 32, 256 held-out contexts, float64",
        "holds if no rank is above d + 1 and a mixture of softmaxes on the same states is above it",
        "numerics.rank",
        12,
        True,
    ),
    Claim(
        "bfloat16",
        "A bfloat16 head's probabilities are off by about 1e-2, which flips near-ties",
        OFTEN,
        "tied, 3 seeds, 2,048 held-out contexts, states and logits rounded",
        "mean relative error of p in 3.2e-3 … 3.2e-2 (interval over seeds); some most probable token flips, and 90% of "
        "the flips are among tokens whose two best are within 0.05 nats; depends if one part alone holds",
        "numerics.bfloat16",
        20,
        True,
    ),
    Claim(
        "padding",
        "Unmasked padding rows are sampled at high temperature, masked ones never",
        "mirage #751, mlx-vlm #1917 (GitHub, 2026)",
        "tied, 3 seeds, 1,000 tokens in 1,024 rows, temperature 2, 51,200 draws each",
        "holds if padding is drawn unmasked in every seed, and never where the head masks it",
        "numerics.padding",
        10,
        True,
    ),
    Claim(
        "prompt_memory",
        "Prompt log-probabilities as [T, V] take far more memory than found blockwise",
        "vLLM #5907 (GitHub, 2024); Wijmans et al. 2024",
        f"{_GEMMA}, 2,048 tokens, float32; compiled, not run",
        "holds from a tenth of the memory down, does not hold from the same memory up, else depends",
        "scale.prompt_memory",
        8,
    ),
    Claim(
        "adaptive_cost",
        "An adaptive head's cost grows slower than V",
        "Grave et al. 2016",
        "nll of 4,096 Zipf-distributed tokens, d = 64, V 8,192 and 65,536, in operations and CPU time",
        "holds if both grow as V to 0.8 or less, does not hold if both as V or faster, else depends",
        "scale.adaptive_cost",
        30,
    ),
    Claim(
        "shard_bits",
        "Another number of shards moves the last bits; in the invariant order it does not",
        "He et al. 2025 on orders of sums",
        "tied, seed 0: log-probabilities of the answers' tokens below, on 1, 2, 4 and 8 shards",
        "holds if the fast order changes a bit on some number and the invariant order none on any",
        "choices.shard_bits",
        40,
        True,
    ),
    Claim(
        "choice_drift",
        "Multiple-choice scores drift with the number of shards in fast mode, not in invariant mode",
        OFTEN,
        "tied, seed 0: 200 held-out questions of 4 answers, summed log-probabilities, on 1, 2, 4 and 8 shards",
        "holds if the fast order changes a score on some number and the invariant order none on any",
        "choices.choice_drift",
        1,
        True,
    ),
    Claim(
        "self_repetition",
        "Tied models give more mass to \u201cthe same token again\u201d",
        OFTEN,
        f"{_RUNS}, 4,096 held-out positions",
        "tied − untied, mean p(next = this): holds if its interval is above 0, does not hold if below, else depends",
        "trained.self_repetition",
        15,
        True,
    ),
    Claim(
        "rare_gradient",
        "Tied, a rare token's output row is trained through the input role",
        "often said; on tied rows Press & Wolf 2017",
        "tied, 3 seeds, gradient of 4,096 held-out tokens; the rarest tenth of the tokens that training text has",
        "holds if the input role's share of their squared gradient is above half (interval), does not hold if below",
        "trained.rare_gradient",
        15,
        True,
    ),
    Claim(
        "rare_norms",
        "Rare tokens' output rows end with other norms tied than untied",
        "often said; on tied rows Press & Wolf 2017",
        f"{_RUNS}; the same tenth",
        "tied − untied: holds if its interval leaves out 0; does not hold if it lies within ±5% of untied's norm; else "
        "depends",
        "trained.rare_norms",
        5,
        True,
    ),
    Claim(
        "rare_loss",
        "Tied models lose less on rare tokens",
        "often said; on tied rows Press & Wolf 2017",
        f"{_RUNS}; held-out targets of the rarer half of the vocabulary",
        "tied − untied, nats a token: holds if its interval is below 0, does not hold if above, else depends",
        "trained.rare_loss",
        1,
        True,
    ),
    Claim(
        "matched_width",
        "Untied's extra parameters do as well in the width of a tied model",
        "Chung et al. 2021",
        f"{_RUNS}, the MLP wider up to untied's parameters",
        "wide tied − untied, held-out nats a token: holds if its interval is at most +0.02, does not hold if above it, "
        "else depends",
        "trained.matched_width",
        1,
        True,
    ),
    Claim(
        "matched_depth",
        "Untied's extra parameters do as well in the depth of a tied model",
        "Chung et al. 2021",
        f"{_RUNS}, more blocks up to untied's parameters",
        "the same rule for deep tied − untied",
        "trained.matched_depth",
        1,
        True,
    ),
    Claim(
        "scoring_generation",
        "Scoring by log-probability and by generation give different accuracies for one model",
        "Wang et al. 2024; Hu & Levy 2023",
        "tied, 3 seeds: the 200 questions; greedy text must equal the answer, or (lenient) be nearest to it",
        "log-probability − generation: holds if the intervals of both readings leave out 0, does not hold if neither "
        "does, else depends",
        "choices.scoring_generation",
        25,
        True,
    ),
)  # fmt: skip


def chosen(names: Sequence[str]) -> list[Claim]:
    """The claims of these names in the table's order, all for none.

    Raises UsageError, with the nearest, for an unknown name.
    """
    known = {claim.name: claim for claim in CLAIMS}
    for name in names:
        if name not in known:
            raise UsageError(
                f"no claim {name!r}; did you mean {nearest(name, known)}? (--list shows all {len(known)})"
            )
    return [claim for claim in CLAIMS if not names or claim.name in names]
