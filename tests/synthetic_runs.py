"""Run directories as training leaves them, written without training."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from headlab.config import default_config, replace, to_json

TEXT = "plain"  # the corpus of runs that say nothing else


def write_run(
    path: Path,
    *,
    head: str = "tied",
    seed: int = 0,
    loss: float = 4.0,
    steps: int = 100,
    log_every: int = 10,
    finished: bool = True,
    reached: int | None = None,
    values: dict[str, Any] | None = None,
    tokenizer: int = 1,
    documents: int = 50,
) -> Path:
    """A run whose held-out loss falls to `loss` nats a token, with every file that is read of one.

    `values` are further options by dotted key. Runs of one `tokenizer` and the same number of `documents` are of one
    text and its tokens.
    """
    path.mkdir(parents=True)
    tree = json.loads(_config(head, tuple(sorted((values or {}).items()))))
    tree["seed"], tree["train"]["steps"], tree["log"]["every"] = seed, steps, log_every
    tree["optimizer"]["warmup_steps"] = steps // 20
    (path / "config.json").write_text(json.dumps(tree))
    (path / "metrics.jsonl").write_text(_metrics(loss, seed, reached or steps, log_every))
    if finished:
        result = _result(head, seed, loss, steps, tokenizer, documents)
        (path / "result.json").write_text(json.dumps(result))
    return path


@functools.cache
def _config(head: str, values: tuple[tuple[str, Any], ...]) -> str:
    return to_json(replace(default_config(), {"head.name": head, **dict(values)}))


def _metrics(loss: float, seed: int, steps: int, log_every: int) -> str:
    noise = np.random.default_rng(seed).normal(0, 0.05, steps)
    every = max(steps // 10, 1)
    lines = []
    for step in range(1, steps + 1):
        now = loss + 5 * np.exp(-5 * step / steps)
        if step % log_every == 0 or step == steps:
            train = {"train/loss": now + noise[step - 1], "train/gradient_norm": 0.5}
            speed = {"timing/tokens_per_second": 1000.0 + step % 7}
            lines.append({"step": step, **train, **speed})
        if step % every == 0 or step == steps:
            bands = [now + band / 5 for band in range(9)] + [None]
            held_out = loss if step == steps else now
            record = {"loss": held_out, "bits_per_byte": held_out / 3, "bands": bands}
            lines.append({"step": step, **{f"validation/{k}": v for k, v in record.items()}})
    return "".join(json.dumps(line) + "\n" for line in lines)


def _result(
    head: str, seed: int, loss: float, steps: int, tokenizer: int, documents: int
) -> dict[str, Any]:
    own = 0 if head == "tied" else 8192 * 128
    sizes = {"documents": documents, "bytes": 400 * documents}
    held_out = {
        "loss": loss,
        "bits_per_byte": loss / 3 / tokenizer,
        "tokens": 1000,
        "bytes": 4000,
        "bands": [loss - 1 + band / 4 for band in range(9)] + [None],
        "band_tokens": [100] * 9 + [0],
    }
    return {
        "head": head,
        "steps": steps,
        "untied_at": None,
        "parameters": {
            "embedding": 8192 * 128,
            "head": own,
            "body": 803968,
            "total": 1852544 + own,
        },
        "train_loss": loss - 0.1,
        "validation": held_out,
        "best": {"step": steps, "loss": loss},
        "test": {**held_out, "loss": loss + 0.01},
        "tokens_seen": steps * 2048,
        "corpus": {
            split: {**sizes, "tokens": 1000 // tokenizer}
            for split in ("train", "validation", "test")
        },
        "vocab_size": 8192,
        "wall_seconds": 12.5,
        "timing": {"seconds": {"step": 10.0}, "shares": {"step": 0.8}, "outside_step": 0.01},
        "config_hash": "0123456789abcdef",
        "seed": seed,
        "environment": {
            "versions": {"python": "3.11.7", "headlab": "0.1", "jax": "0.10.2"},
            "platform": "Linux",
            "backend": "cpu",
            "device_kind": "cpu",
            "device_count": 1,
            "git": {"commit": "ab" * 20, "dirty": False},
        },
    }
