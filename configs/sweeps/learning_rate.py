"""learning_rate: what is each head's best peak rate, so that heads can be compared at their best?

    headlab sweep --config=configs/sweeps/learning_rate.py --workdir=runs/learning_rate
    headlab sweep --config=configs/sweeps/learning_rate.py:tiny --workdir=runs/learning_rate_tiny --vectorized

Points: every registered head at micro size, at five peak rates a factor of two apart around that of micro, in seed 0,
for 2,000 steps. Rates of one head can be trained together (--vectorized), but for the adaptive head.
"tiny" is at tiny size for 60 steps, three rates.
Expected time and losses: not recorded.
"""

from ml_collections import FrozenConfigDict

from headlab import heads, sweeps


def get_sweep(text: str = "") -> sweeps.Sweep:
    tiny = "tiny" in sweeps.words(text, "tiny")
    powers = (-1, 0, 1) if tiny else (-2, -1, 0, 1, 2)

    def points(base: FrozenConfigDict) -> sweeps.Points:
        rates = [base.optimizer.peak_rate * 2.0**power for power in powers]
        return sweeps.product(
            sweeps.values("head.name", heads.names()), sweeps.values("optimizer.peak_rate", rates)
        )

    return sweeps.Sweep(
        base="configs/tiny.py" if tiny else "configs/micro.py",
        points=points,
        question="What is the best peak rate of each head?",
        baseline={"head.name": "tied"},
        overrides={} if tiny else {"train.steps": 2000},
    )
