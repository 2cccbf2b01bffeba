"""tied_vs_untied: how much held-out loss does an output matrix of its own bring over the tied embedding table?

    headlab sweep --config=configs/sweeps/tied_vs_untied.py --workdir=runs/tied_vs_untied_sweep
    headlab sweep --config=configs/sweeps/tied_vs_untied.py:matched --workdir=runs/tied_vs_untied_matched
    headlab sweep --config=configs/sweeps/tied_vs_untied.py:tiny --workdir=runs/tied_vs_untied_tiny

Points: tied and untied, seeds 0, 1 and 2, at micro size for 6,000 steps. Untied has a matrix more, 57% more parameters;
"matched" adds tied models that have as many, in wider MLPs or in more blocks, to within 0.5% of untied's total.
"tiny" is at tiny size for its 60 steps, in seconds; its words can be joined: "matched,tiny".
Expected time and losses: an hour a run on a CPU core, so three hours with --jobs=2 on two; 4.074 nats a token tied,
4.002 untied, 0.072 apart (0.027 to 0.118); experiments/tied_vs_untied has the runs. Not recorded of "matched".
"""

from ml_collections import FrozenConfigDict

from headlab import sweeps

SEEDS = range(3)
TOLERANCE = 0.005


def get_sweep(text: str = "") -> sweeps.Sweep:
    words = sweeps.words(text, "matched", "tiny")

    def points(base: FrozenConfigDict) -> sweeps.Points:
        heads = sweeps.values("head.name", ["tied", "untied"])
        more = matched(base) if "matched" in words else ()
        every = sweeps.product(sweeps.chain(heads, more), sweeps.values("seed", SEEDS))
        # seed by seed: what is finished can be compared before all is
        return sweeps.sort(every, "seed")

    return sweeps.Sweep(
        base="configs/tiny.py" if "tiny" in words else "configs/micro.py",
        points=points,
        question="How much held-out loss does an untied output matrix bring over the tied table?",
        baseline={"head.name": "tied"},
    )


def matched(base: FrozenConfigDict) -> sweeps.Points:
    """Tied models with the parameters of the untied one: in the width of the MLP, and in blocks."""
    tied = sweeps.config_of(base, {"head.name": "tied"})
    target = sweeps.size(sweeps.config_of(base, {"head.name": "untied"})).parameters
    wide = sweeps.match(tied, "model.d_mlp", target, "parameters", tolerance=TOLERANCE)
    # blocks are coarse: more of them, and then the MLP makes up the rest
    layers = sweeps.match(tied, "model.n_layers", target, "parameters", tolerance=1.0)
    deep = sweeps.config_of(base, {"head.name": "tied", "model.n_layers": layers})
    rest = sweeps.match(deep, "model.d_mlp", target, "parameters", tolerance=TOLERANCE)
    return sweeps.points(
        {"head.name": "tied", "model.d_mlp": wide},
        {"head.name": "tied", "model.n_layers": layers, "model.d_mlp": rest},
    )
