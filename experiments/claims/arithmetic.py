"""Claims that arithmetic alone decides: parameters, blocks, bytes, the roofline of a decode step."""

from experiments.claims.findings import Finding, near, together, yes
from experiments.claims.runs import ROOT, Context
from headlab.config import load
from headlab.costs import CHIPS, Setting, model_cost, preset

SETTING = Setting(context=1024, batch=1, itemsize=2)
MICRO = {"tied": 1_852_544, "untied": 2_901_120}
OFF = 0.1  # of the ratio of sizes: what is out of proportion


def micro_size(context: Context) -> Finding:
    """The parameters of configs/micro.py as the built model counts them."""
    from headlab.sweeps import size

    file = str(ROOT / "configs" / "micro.py")
    counted = {head: size(load(file, [("head.name", head)])).parameters for head in MICRO}
    return micro_finding(counted)


def micro_finding(counted: dict[str, int]) -> Finding:
    """The verdict on the parameters of micro by head."""
    more = counted["untied"] / counted["tied"] - 1
    verdict = yes(counted == MICRO and round(100 * more) == 57)
    found = f"{counted['tied']:,} tied, {counted['untied']:,} untied: {more:.1%} more"
    return Finding({**counted, "more": more}, verdict, found)


def head_blocks(context: Context, model: str = "gemma-2-2b") -> Finding:
    """How many blocks the head of a published model equals, by two countings."""
    cost = model_cost(preset(model), SETTING)
    by = {"matrices": cost.blocks_by_matrices, "shorthand": cost.blocks_by_shorthand}
    found = (
        f"{by['matrices']:.2f} blocks by their own matrices, {by['shorthand']:.2f} by the shorthand"
    )
    return Finding(by, together(near(blocks, 10) for blocks in by.values()), found)


def head_bytes(context: Context, model: str = "gemma-2-2b") -> Finding:
    """The head's share of what a decode step reads, by two countings."""
    cost = model_cost(preset(model), SETTING)
    by = {"weights": cost.head_share_of_weights, "with_cache": cost.head_share_of_bytes}
    found = f"{by['weights']:.1%} of the weights, {by['with_cache']:.1%} with keys and values"
    return Finding(by, together(near(share, 0.25) for share in by.values()), found)


def decode_size(
    context: Context, small: str = "gemma-2-2b", large: str = "llama-2-7b", chip: str = "h100"
) -> Finding:
    """The least time of a decode step beside the sizes of two models, by two countings of size."""
    one, other = (model_cost(preset(name), SETTING, CHIPS[chip]) for name in (small, large))
    assert one.decode is not None and other.decode is not None  # a chip was given
    time = one.decode["tokens_per_second"] / other.decode["tokens_per_second"]
    body, whole = (other.parameters[key] / one.parameters[key] for key in ("body", "total"))
    verdict = together(yes(abs(time / ratio - 1) > OFF) for ratio in (body, whole))
    found = (
        f"it decodes {time:.2f} times as fast; the other has {body:.2f} times its parameters outside the embedding, "
        f"{whole:.2f} times all of them"
    )
    return Finding({"times": time, "body": body, "total": whole}, verdict, found)
