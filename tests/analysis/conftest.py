"""One tiny trained run that the tests of runs share, with checkpoints of two steps."""

import random

import pytest


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """The directory of a run: an untied head of width 8 over 300 tokens, checkpoints at steps 2 and 4."""
    from headlab import config, training

    rng, root = random.Random(0), tmp_path_factory.mktemp("rank")
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 6))) for _ in range(200)]
    text = root / "words.txt"
    text.write_text("".join(" ".join(rng.choices(words, k=300)) + ".\n\n" for _ in range(120)))
    options = {
        "data.corpus": f"text:{text}",
        "data.vocab_size": "300",
        "data.seq_len": "16",
        "model.n_layers": "1",
        "model.d_model": "8",
        "model.n_heads": "2",
        "model.max_length": "16",
        "head.name": "untied",
        "train.steps": "4",
        "optimizer.warmup_steps": "1",
        "checkpoint.every": "2",
        "checkpoint.keep": "2",
        "log.progress": "false",
    }
    settings = config.load("configs/tiny.py", list(options.items()))
    training.train(settings, str(root / "run"))
    return root / "run"
