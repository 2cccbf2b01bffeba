"""head_zoo: which head gives the lowest held-out loss when all models are equally large, or equally dear to train?

    headlab sweep --config=configs/sweeps/head_zoo.py --workdir=runs/zoo
    headlab sweep --config=configs/sweeps/head_zoo.py:flops --workdir=runs/zoo_flops
    headlab sweep --config=configs/sweeps/head_zoo.py:tiny --workdir=runs/zoo_tiny

Points: every registered head at micro size, seeds 0, 1 and 2. The largest model keeps its MLP, and the MLPs of the
others are widened until all have as many parameters, to within 0.5%; with "flops", until all need as many operations a
token of a training step, to within 0.5% (an adaptive head's are counted with the corpus's own token frequencies).
"tiny" is at tiny size for 60 steps, in one seed; its words can be joined: "flops,tiny".
Expected time and losses: not recorded at this size; experiments/head_zoo has those of a smaller one.
"""

from typing import Any

from ml_collections import FrozenConfigDict

from headlab import data, heads, sweeps

TOLERANCE = 0.005


def get_sweep(text: str = "") -> sweeps.Sweep:
    words = sweeps.words(text, "flops", "tiny")
    measure: sweeps.Measure = "flops" if "flops" in words else "parameters"

    def points(base: FrozenConfigDict) -> sweeps.Points:
        seeds = range(1) if "tiny" in words else range(3)
        every = sweeps.product(matched(base, measure), sweeps.values("seed", seeds))
        # seed by seed: what is finished can be compared before all is
        return sweeps.sort(every, "seed")

    return sweeps.Sweep(
        base="configs/tiny.py" if "tiny" in words else "configs/micro.py",
        points=points,
        question=f"Which head gives the lowest held-out loss at equal {measure}?",
        baseline={"head.name": "tied"},
    )


def matched(base: FrozenConfigDict, measure: sweeps.Measure) -> sweeps.Points:
    """Every head, with the width of the MLP that makes its model as large as the largest."""
    counts = None
    if measure == "flops":
        counts = data.open_dataset(base.data, progress=base.log.progress).store.counts
    options = {name: {"head.name": name, **own_options(name, base)} for name in heads.names()}
    models = {name: sweeps.config_of(base, chosen) for name, chosen in options.items()}
    target = max(getattr(sweeps.size(model, counts), measure) for model in models.values())
    return sweeps.points(
        *(
            options[name]
            | {
                "model.d_mlp": sweeps.match(
                    models[name],
                    "model.d_mlp",
                    target,
                    measure,
                    tolerance=TOLERANCE,
                    token_counts=counts,
                )
            }
            for name in options
        )
    )


def own_options(name: str, base: FrozenConfigDict) -> dict[str, Any]:
    """What a head needs to be told here, beside its defaults."""
    if name == "adaptive":  # cutoffs that do not depend on the corpus, so that sizes do not either
        vocab_size = base.data.vocab_size
        return {"head.cutoffs": (vocab_size // 8, vocab_size // 2)}
    return {}
