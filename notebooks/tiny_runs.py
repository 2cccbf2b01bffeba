"""What the notebooks share: a made-up text, and runs of configs/tiny.py on it that take seconds.

The text is made up so that a notebook needs no corpus: words of Zipf-like frequency, each of which has a few words that
are likely to follow it.
"""

import random
from pathlib import Path
from typing import Any

from headlab import config, training
from headlab.runs import RunDirectory

ROOT = next(p for p in Path(__file__).resolve().parents if (p / "pyproject.toml").exists())
WORDS, SUCCESSORS, DOCUMENTS = 1000, 6, 400


def write_text(folder: str | Path) -> str:
    """Writes the text, about 600 kB, into `folder`; returns its name as a corpus, "text:FILE"."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 7))) for _ in range(WORDS)]
    zipf = [1 / (rank + 1) for rank in range(WORDS)]
    following = [rng.choices(range(WORDS), zipf, k=SUCCESSORS) for _ in words]
    likely = [1 / (rank + 1) for rank in range(SUCCESSORS)]
    path = Path(folder) / "made_up.txt"
    with path.open("w", encoding="utf-8") as file:
        for _ in range(DOCUMENTS):
            word, said = 0, []
            for _ in range(280):
                # one word in five comes out of the blue
                known = rng.random() < 0.8
                word = rng.choices(*((following[word], likely) if known else (range(WORDS), zipf)))[
                    0
                ]
                said.append(words[word])
            file.write(" ".join(said) + ".\n\n")
    return f"text:{path}"


def train(head: str, text: str, workdir: str | Path, seed: int = 0) -> dict[str, Any]:
    """Trains configs/tiny.py with this head for 300 steps on the text; returns what result.json holds."""
    settings = config.load(
        str(ROOT / "configs" / "tiny.py"),
        [
            ("head.name", head),
            ("seed", str(seed)),
            ("data.corpus", text),
            ("train.steps", "300"),
            ("optimizer.warmup_steps", "30"),
            ("eval.every", "50"),
            ("checkpoint.every", "150"),
            ("log.every", "10"),
            ("log.progress", "false"),
        ],
    )
    return training.train(settings, str(workdir))


def loss_curve(run: str | Path) -> list[tuple[int, float]]:
    """(step, held-out loss in nats a token) at each evaluation of a run."""
    records = RunDirectory(run).metrics()
    return [(r["step"], r["validation/loss"]) for r in records if "validation/loss" in r]
