"""text_ranks: which rank do the log-probabilities of each head have on held-out text?

    headlab sweep --config=configs/sweeps/text_ranks.py --workdir=runs/softmax_bottleneck/text_ranks
    headlab sweep --config=configs/sweeps/text_ranks.py:tiny --workdir=runs/text_ranks_tiny

Points: every registered head at micro size, with the defaults of its own options, in seed 0. `python -m
experiments.softmax_bottleneck.run text_ranks` trains these runs, or takes them as they are, and measures the ranks.
"tiny" is untied and mixture_of_softmaxes at tiny size for 60 steps.
Expected time and losses: not recorded of all 6,000 steps; experiments/softmax_bottleneck has those of 300.
"""

from headlab import heads, sweeps


def get_sweep(text: str = "") -> sweeps.Sweep:
    tiny = "tiny" in sweeps.words(text, "tiny")
    names = ("untied", "mixture_of_softmaxes") if tiny else heads.names()
    return sweeps.Sweep(
        base="configs/tiny.py" if tiny else "configs/micro.py",
        points=sweeps.values("head.name", names),
        question="Which rank do the log-probabilities of each head have on held-out text?",
        baseline={"head.name": "untied"},
    )
