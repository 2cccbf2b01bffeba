"""late_untying: does a head that begins tied and is untied on the way end below both tied and untied?

    headlab sweep --config=configs/sweeps/late_untying.py --workdir=runs/late_untying
    headlab sweep --config=configs/sweeps/late_untying.py:tiny --workdir=runs/late_untying_tiny

Points: tied, untied, and untied after 0.1, 0.33, 0.67 and 0.9 of the steps, seeds 0, 1 and 2, at micro size.
"tiny" is at tiny size for 60 steps, untied after 0.33 and 0.67, in one seed.
Expected time and losses: not recorded.
"""

from headlab import sweeps


def get_sweep(text: str = "") -> sweeps.Sweep:
    tiny = "tiny" in sweeps.words(text, "tiny")
    late = sweeps.product(
        sweeps.values("head.name", ["tied"]),
        sweeps.values("head.untie_at", (0.33, 0.67) if tiny else (0.1, 0.33, 0.67, 0.9)),
    )
    return sweeps.Sweep(
        base="configs/tiny.py" if tiny else "configs/micro.py",
        points=sweeps.product(
            sweeps.chain(sweeps.values("head.name", ["tied", "untied"]), late),
            sweeps.values("seed", range(1 if tiny else 3)),
        ),
        question="Does a head that is untied on the way end below both tied and untied?",
        baseline={"head.name": "tied"},
    )
