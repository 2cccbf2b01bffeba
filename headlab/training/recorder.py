"""What one run leaves behind while it trains: metrics, checkpoints, and in the end its result."""

import math
import resource
import sys
from contextlib import ExitStack
from typing import Any

import jax

from headlab import config as configs
from headlab import data, processes
from headlab.errors import HeadlabError
from headlab.runs import RunDirectory, environment, phase_at, rounding
from headlab.training.checkpoints import Checkpoints
from headlab.training.evaluation import Evaluator
from headlab.training.metrics import Writer, open_writers
from headlab.training.step import Phase, TrainState
from headlab.training.timing import Clock


class Recorder:
    """Writes the files of one run, and reads its batches."""

    def __init__(
        self, config: Any, run: RunDirectory, dataset: data.Dataset, clock: Clock, stack: ExitStack
    ):
        """What is opened here is closed with `stack`."""
        self.config, self.run, self.clock = config, run, clock
        self.store = dataset.store
        self.vocab_size = dataset.tokenizer.vocab_size
        self.batches = data.TrainBatches(
            self.store.tokens("train"), config.data.seq_len, config.train.batch_size, config.seed
        )
        self.checkpoints = stack.enter_context(
            Checkpoints(run.checkpoints_dir, keep=config.checkpoint.keep)
        )
        self._stack = stack
        self._writers: list[Writer] = []
        self._spent_before = 0.0
        self._rounding = rounding()
        self._evaluated: tuple[int, dict[str, Any]] | None = None  # the last evaluation, its step
        self._held_out: list[float] = []  # the losses of all evaluations so far

    def restored(self, target: Any, step: int | None) -> tuple[TrainState, int]:
        """(state, step) of the checkpoint of a step, or of the latest good one."""
        state, metadata, step = self.checkpoints.restore(target, step, vocab_size=self.vocab_size)
        for bad, reason in self.checkpoints.bad:
            say(self.config, f"The checkpoint of step {bad} was damaged and moved aside: {reason}.")
        self._spent_before = metadata["wall_seconds"]
        say(self.config, f"Resuming {self.run.path} from step {step:,}.")
        for key, old in metadata.get("rounding", {}).items():
            new = self._rounding.get(key)
            if new != old:
                say(
                    self.config,
                    f"{key} is {new!r} from here on; the steps before were made with {old!r}, and float32 sums may "
                    "round otherwise.",
                )
        return state, step

    def begin(self, start: int) -> None:
        """Opens the writers, with the metrics cut back to the step that the run goes on from."""
        if processes.first():
            self._writers = open_writers(self.config, self.run, start if start else None)
        for writer in self._writers:
            self._stack.callback(writer.close)
        processes.barrier("metrics are cut back to the restored step")
        records = self.run.metrics()
        self._held_out = [r["validation/loss"] for r in records if "validation/loss" in r]

    def write(self, step: int, record: dict[str, Any]) -> None:
        """Adds the metrics of a step."""
        for writer in self._writers:
            writer.write(step, record)

    def check_finite(self, phase: Phase, bad_step: Any) -> None:
        """Raises HeadlabError where a step had a loss or a gradient that was not finite."""
        bad = int(bad_step)
        if bad < 0:
            return
        self.checkpoints.wait()
        good = self.checkpoints.latest_step()
        intact = (
            "there is no checkpoint yet"
            if good is None
            else f"the checkpoint of step {good} is the last good one"
        )
        raise HeadlabError(
            f"the loss or its gradient was not finite in step {bad + 1:,} (head {phase.head_name!r}); {intact}, in "
            f"{self.run.checkpoints_dir}. Lower optimizer.peak_rate or set optimizer.clip_norm; if this is the first "
            "step, look for a token id outside the vocabulary."
        )

    def evaluate(self, state: TrainState, evaluator: Evaluator, step: int) -> tuple[float, bool]:
        """(held-out loss, whether it is the best so far), written to the metrics."""
        found = evaluator((state.params, state.constants), "validation")
        self._evaluated = (step, found)
        if not math.isfinite(found["loss"]):
            raise HeadlabError(
                f"the held-out loss after step {step:,} is {found['loss']}, though training was finite; "
                f"the last good checkpoint is step {self.checkpoints.latest_step()}. Evaluate it to look for the cause."
            )
        record = {f"validation/{key}": found[key] for key in ("loss", "bits_per_byte", "bands")}
        self.write(step, record)
        best = all(found["loss"] < loss for loss in self._held_out)
        self._held_out.append(found["loss"])
        return found["loss"], best

    def save(self, step: int, state: TrainState, phase: Phase, held_out: float | None) -> None:
        """Begins to save a checkpoint."""
        metadata = {
            "head": phase.head_name,
            "phase": phase_at(self.config, step),
            "vocab_size": self.vocab_size,
            "wall_seconds": self._spent_before + self.clock.total(),
            "rounding": self._rounding,
        }
        for writer in self._writers:
            writer.flush()  # what the checkpoint makes final must not be lost
        self.checkpoints.save(step, state, metadata, held_out=held_out)

    def finish(
        self, phase: Phase, state: TrainState, evaluator: Evaluator, *, together: int
    ) -> dict[str, Any]:
        """Reads the test split, once, and writes result.json; `together` is how many runs shared the program."""
        self.checkpoints.wait()
        with self.clock.part("evaluation"):
            # A run that was killed between its last checkpoint and its result has not evaluated here.
            step, final = self._evaluated or (None, None)
            if step != self.config.train.steps or final is None:
                final = evaluator((state.params, state.constants), "validation")
            test = evaluator((state.params, state.constants), "test")
        if processes.first():
            self._write_result(phase, final, test, together)
        processes.barrier("the result is written")
        result = self.run.result()
        if result is None:
            raise HeadlabError(
                f"{self.run.result_path} cannot be read by process {jax.process_index()}: all processes must see the "
                "run directory, on a file system that they share."
            )
        return result

    def _write_result(
        self, phase: Phase, final: dict[str, Any], test: dict[str, Any], together: int
    ) -> None:
        config, records = self.config, self.run.metrics()
        held_out = [(r["validation/loss"], r["step"]) for r in records if "validation/loss" in r]
        best_loss, best_step = min(held_out)
        counts = self.store.meta["splits"]
        timing = self.clock.shares()
        result = {
            "head": config.head.name,
            "steps": config.train.steps,
            "untied_at": configs.untie_step(config),
            "parameters": phase.parameters,
            "train_loss": next(r["train/loss"] for r in reversed(records) if "train/loss" in r),
            "validation": final,
            "best": {"step": best_step, "loss": best_loss},
            "test": test,
            "tokens_seen": self.batches.targets_seen(config.train.steps),
            "corpus": {split: counts[split] for split in data.SPLITS},
            "vocab_size": self.vocab_size,
            "wall_seconds": self._spent_before + self.clock.total(),
            "timing": timing,
            "runs_together": together,
            "peak_memory": peak_memory(),
            "config_hash": configs.config_hash(config),
            "seed": config.seed,
            "environment": environment(),
        }
        self.run.write_result(result)
        shares = ", ".join(f"{part} {share:.1%}" for part, share in timing["shares"].items())
        outside = timing["outside_step"]
        if outside is not None:
            shares += f"; data, metrics and checkpoints took {outside:.1%} of training"
        say(config, f"{self.clock.total():.1f} s: {shares}.")


def peak_memory() -> dict[str, Any]:
    """The largest memory use of this process so far: bytes, and their kind.

    "process": resident memory of the process, on a CPU. "device": the most that one device of an accelerator held; None
    bytes where it does not say.
    """
    if jax.default_backend() == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"kind": "process", "bytes": peak if sys.platform == "darwin" else 1024 * peak}
    known = [
        (device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()
    ]
    return {"kind": "device", "bytes": max((peak for peak in known if peak), default=None)}


def train_record(report: dict[str, Any]) -> dict[str, float]:
    """Means over the steps since the last log, and the last step's gradient norm."""
    interval = {
        k.removeprefix("interval/"): float(v)
        for k, v in report.items()
        if k.startswith("interval/")
    }
    weight = interval.pop("weight")
    mean = {key: value / weight if weight else math.nan for key, value in interval.items()}
    record = {"train/loss": mean.pop("nats"), "train/gradient_norm": float(report["gradient_norm"])}
    return {**record, **{f"train/{key}": value for key, value in mean.items()}}


def say(config: Any, message: str) -> None:
    """Prints to standard error, where progress is asked for."""
    if config.log.progress and processes.first():
        print(message, file=sys.stderr)
