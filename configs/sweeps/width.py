"""width: how does what an untied matrix brings change with the width of the model?

    headlab sweep --config=configs/sweeps/width.py --workdir=runs/width
    headlab sweep --config=configs/sweeps/width.py:tiny --workdir=runs/width_tiny

Points: tied and untied at widths 64, 128, 256 and 512, seeds 0, 1 and 2, the rest as in micro (four attention heads, an
MLP of four times the width). The peak rate falls as 1/√width from that of width 128.
"tiny" is at tiny size for 60 steps, widths 16 and 32, in one seed.
Expected time and losses: not recorded.
"""

from ml_collections import FrozenConfigDict

from headlab import sweeps


def get_sweep(text: str = "") -> sweeps.Sweep:
    tiny = "tiny" in sweeps.words(text, "tiny")
    widths = (16, 32) if tiny else (64, 128, 256, 512)

    def points(base: FrozenConfigDict) -> sweeps.Points:
        peak, width = base.optimizer.peak_rate, base.model.d_model
        rates = [float(f"{peak * (width / each) ** 0.5:.2g}") for each in widths]
        return sweeps.product(
            sweeps.values("head.name", ["tied", "untied"]),
            sweeps.zip(
                sweeps.values("model.d_model", widths),
                sweeps.values("model.d_mlp", [4 * each for each in widths]),
                sweeps.values("optimizer.peak_rate", rates),
            ),
            sweeps.values("seed", range(1 if tiny else 3)),
        )

    return sweeps.Sweep(
        base="configs/tiny.py" if tiny else "configs/micro.py",
        points=points,
        question="How does what an untied output matrix brings change with the width of the model?",
        baseline={"head.name": "tied"},
    )
