"""vocab: how do tied and untied heads compare as the vocabulary grows?

    headlab sweep --config=configs/sweeps/vocab.py --workdir=runs/vocab
    headlab sweep --config=configs/sweeps/vocab.py:tiny --workdir=runs/vocab_tiny

Points: tied and untied over 2,048, 4,096, 8,192 and 16,384 tokens, seeds 0, 1 and 2, at micro size. Losses a token of
different vocabularies do not compare; bits per byte do. "tiny" is at tiny size for 60 steps, 512 and 1,024 tokens, in
one seed.
Expected time and losses: not recorded.
"""

from headlab import sweeps


def get_sweep(text: str = "") -> sweeps.Sweep:
    tiny = "tiny" in sweeps.words(text, "tiny")
    sizes = (512, 1024) if tiny else (2048, 4096, 8192, 16384)
    return sweeps.Sweep(
        base="configs/tiny.py" if tiny else "configs/micro.py",
        points=sweeps.product(
            sweeps.values("head.name", ["tied", "untied"]),
            sweeps.values("data.vocab_size", sizes),
            sweeps.values("seed", range(1 if tiny else 3)),
        ),
        question="How do tied and untied heads compare as the vocabulary grows?",
        baseline={"head.name": "tied"},
    )
