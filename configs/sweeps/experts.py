"""experts: how many experts does a mixture need, and what do they bring over one softmax?

    headlab sweep --config=configs/sweeps/experts.py --workdir=runs/experts
    headlab sweep --config=configs/sweeps/experts.py:tiny --workdir=runs/experts_tiny

Points: mixture_of_softmaxes, mixture_of_contexts and mixtape with 2, 4, 8 and 16 experts, beside untied, seeds 0, 1 and
2, at micro size. "tiny" is at tiny size for 60 steps, 2 and 4 experts, in one seed.
Expected time and losses: not recorded.
"""

from headlab import sweeps

HEADS = ("mixture_of_softmaxes", "mixture_of_contexts", "mixtape")


def get_sweep(text: str = "") -> sweeps.Sweep:
    tiny = "tiny" in sweeps.words(text, "tiny")
    mixtures = sweeps.product(
        sweeps.values("head.name", HEADS),
        sweeps.values("head.n_experts", (2, 4) if tiny else (2, 4, 8, 16)),
    )
    return sweeps.Sweep(
        base="configs/tiny.py" if tiny else "configs/micro.py",
        points=sweeps.product(
            sweeps.chain(sweeps.values("head.name", ["untied"]), mixtures),
            sweeps.values("seed", range(1 if tiny else 3)),
        ),
        question="How many experts does a mixture need, and what do they bring over one softmax?",
        baseline={"head.name": "untied"},
    )
