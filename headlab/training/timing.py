"""How fast a run is and where its time goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from headlab import costs, models
from headlab.training.step import Phase


class Speed:
    """Tokens a second since the last log, without evaluations, and the share of the device's peak where it is known."""

    def __init__(self, config, phase: Phase, mesh):
        self._tokens_per_step = config.train.batch_size * config.data.seq_len
        body = models.body_flops_per_token(config)
        head = phase.head_cost.flops_per_token
        peak = costs.peak_flops(jax.devices()[0].device_kind)
        self._peak_tokens = None if peak is None else peak * mesh.size / (3 * body + head)
        self._since: tuple[int, float] | None = None

    def record(self, step: int) -> dict[str, float]:
        now = time.perf_counter()
        since, self._since = self._since, (step, now)
        if since is None or step == since[0]:
            return {}
        rate = (step - since[0]) * self._tokens_per_step / (now - since[1])
        record = {"timing/tokens_per_second": rate}
        if self._peak_tokens is not None:
            record["timing/mfu"] = rate / self._peak_tokens
        return record

    def pause(self, step: int) -> None:
        self._since = (step, time.perf_counter())


class Clock:
    """Where the wall time of a run goes."""

    def __init__(self):
        self._began = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def total(self) -> float:
        return time.perf_counter() - self._began

    def shares(self) -> dict[str, Any]:
        """Seconds and shares by part.

        `outside_step` is what data, metrics and checkpoints took of the time that they and the steps took.
        """
        seconds = {**self._seconds, "other": self.total() - sum(self._seconds.values())}
        total = sum(seconds.values())
        outside = sum(seconds.get(part, 0.0) for part in ("data", "metrics", "checkpoint"))
        training = outside + seconds.get("step", 0.0)
        return {
            "seconds": seconds,
            "shares": {part: spent / total for part, spent in seconds.items()},
            "outside_step": outside / training if training else None,
        }
