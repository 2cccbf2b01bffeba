"""head_width: how do loss and rank change with the width of the head alone, of one softmax and of a mixture?

    headlab sweep --config=configs/sweeps/head_width.py --workdir=runs/softmax_bottleneck/width/search
    headlab sweep --config=configs/sweeps/head_width.py:rates=runs/softmax_bottleneck/width/rates.json \\
        --workdir=runs/softmax_bottleneck/width/seeds
    headlab sweep --config=configs/sweeps/head_width.py:tiny --workdir=runs/head_width_tiny --vectorized

Points: low_rank and mixture_of_softmaxes whose rows are 16, 32, 64, 128 and 256 wide, on micro with d_model = 256. The
first command is a search for the peak rate of each: five rates a factor of two apart around that of micro (which falls
as 1/√width from width 128), in seed 0 for 2,000 steps. With "rates=FILE" each has the rate that the file gives it, in
seeds 1, 2 and 3, for micro's steps. `python -m experiments.softmax_bottleneck.run width` does both, writes the file
between them, and measures the ranks.
"centre=RATE" puts another rate in the middle of those tried: the fewer the steps, the higher the best rate is.
"tiny" is at tiny size for 60 steps, widths 4 and 8, two rates, and one seed: "tiny,rates=FILE".
Expected time and losses: not recorded at this size; experiments/softmax_bottleneck has those of a smaller one.

The body is the same at all points, so that what differs is the head: d_model stays, and with it the input table, and
the width of the head's own rows varies, `rank` of low_rank and `d_latent` of the mixture. Were d_model varied, with the
MLP made up for it, attention and the input table would change as well. d_model is that of the widest head, for low_rank
cannot be wider than the body; at 256 it bounds nothing that untied wouldn't.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import FrozenConfigDict

from headlab import sweeps
from headlab.errors import UsageError

D_MODEL = 256
WIDTH_OPTIONS = {"low_rank": "head.rank", "mixture_of_softmaxes": "head.d_latent"}


def get_sweep(text: str = "") -> sweeps.Sweep:
    before, given, file = text.partition("rates=")
    before, centred, middle = before.partition("centre=")
    if given and centred:
        raise UsageError(
            f"{text}: centre= is of the search and rates= of what comes after it; give one of the two"
        )
    tiny = "tiny" in sweeps.words(before, "tiny")
    widths = (4, 8) if tiny else (16, 32, 64, 128, 256)
    shape = {} if tiny else {"model.d_model": D_MODEL}
    steps = {} if tiny or given else {"train.steps": 2000}

    def points(base: FrozenConfigDict) -> sweeps.Points:
        if given:
            seeds = (1,) if tiny else (1, 2, 3)  # seed 0 chose the rates
            return sweeps.product(chosen(file, widths), sweeps.values("seed", seeds))
        centre = base.optimizer.peak_rate if tiny else base.optimizer.peak_rate * 0.5**0.5
        if centred:
            centre = rate_of(middle)
        rates = [
            float(f"{centre * 2.0**power:.2g}")
            for power in ((-1, 0) if tiny else (-2, -1, 0, 1, 2))
        ]
        return sweeps.product(
            sweeps.chain(*(heads_of(width) for width in widths)),
            sweeps.values("optimizer.peak_rate", rates),
        )

    return sweeps.Sweep(
        base="configs/tiny.py" if tiny else "configs/micro.py",
        points=points,
        question="How do loss and rank change with the width of the head, in one body?",
        baseline={"head.name": "low_rank"},
        overrides=shape | steps,
    )


def rate_of(text: str) -> float:
    """The rate in "centre=RATE"; UsageError where it is none."""
    try:
        rate = float(text.strip(" ,"))
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise UsageError(f"centre={text}: it must be a peak rate above 0, as in centre=0.004")
    return rate


def heads_of(width: int) -> sweeps.Points:
    """Both heads at one width of their rows."""
    return sweeps.points(*({"head.name": head, key: width} for head, key in WIDTH_OPTIONS.items()))


def chosen(file: str, widths: Sequence[int]) -> sweeps.Points:
    """The heads that a file of rates has, each with its rate: [{"head", "width", "peak_rate", …}, …].

    Raises UsageError where the file cannot be read, or is not of these heads and widths.
    """
    try:
        choices: list[Mapping[str, Any]] = json.loads(Path(file).read_text(encoding="utf-8"))
        found = [(each["head"], each["width"], float(each["peak_rate"])) for each in choices]
    except (OSError, ValueError, TypeError, KeyError) as problem:
        raise UsageError(
            f"rates={file} cannot be read as a list of head, width and peak_rate ({problem!r}); give the rates.json "
            "that `python -m experiments.softmax_bottleneck.run width` wrote"
        ) from None
    for head, width, _ in found:
        if head not in WIDTH_OPTIONS or width not in widths:
            raise UsageError(
                f"rates={file} has {head!r} at width {width!r}; heads are {', '.join(WIDTH_OPTIONS)}, and widths "
                f"{', '.join(map(str, widths))}"
            )
    return sweeps.points(
        *(
            {"head.name": head, WIDTH_OPTIONS[head]: width, "optimizer.peak_rate": rate}
            for head, width, rate in found
        )
    )
