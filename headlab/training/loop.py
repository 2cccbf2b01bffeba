"""The training loop: from a config and a directory to a finished run, resumable to the same bits at any kill."""

import math
import signal
import sys
from contextlib import ExitStack, nullcontext
from typing import Any

import jax
import numpy as np

from headlab import config as configs
from headlab import data, models, processes, sharding
from headlab.errors import HeadlabError
from headlab.ops.shards import VOCAB
from headlab.runs import RunDirectory, environment, phase_at, phases_of
from headlab.training.checkpoints import Checkpoints
from headlab.training.evaluation import Evaluator
from headlab.training.metrics import Writer, open_writers
from headlab.training.step import (
    Phase,
    TrainState,
    make_phase,
    state_specs,
    train_step,
    untie,
)
from headlab.training.stopping import Interrupted, stop_signals
from headlab.training.timing import Clock, Speed


def train(config: Any, workdir: str) -> dict[str, Any]:
    """Trains to the end and returns what result.json holds; goes on where an earlier call was stopped.

    A finished run is returned as it is. On SIGTERM or SIGINT the step in progress is finished and saved, and
    `Interrupted` is raised.

    Raises:
      UsageError: something asked for cannot be done; nothing was started.
      HeadlabError: a loss that is not finite, or a checkpoint or metric that could not be written.
    """
    config = configs.resolve(config)
    earlier = RunDirectory(workdir)
    if earlier.config_path.exists():
        # another config is refused before any work
        RunDirectory.create_or_open(workdir, _as_recorded(config, earlier.config()))
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.vocab)
    configs.check_mesh(config, dict(mesh.shape))
    if config.data.tokenizer is None:
        _check_model(config)
    dataset = data.open_dataset(config.data, progress=config.log.progress)
    config = models.resolve_head(config, dataset.tokenizer.vocab_size, dataset.store.counts)
    if processes.first():
        RunDirectory.create_or_open(workdir, config)
    processes.barrier("the run directory exists")
    run, differing = RunDirectory.create_or_open(workdir, config)
    with run.lock() if processes.first() else nullcontext():
        finished = run.result()
        if finished is not None:
            _say(config, f"{workdir} has finished already; its result is returned as it is.")
            return finished
        processes.barrier("nothing was finished")
        for key, (old, new) in differing.items():
            _say(config, f"{key} is {new!r} from here on; the run was made with {old!r}.")
        if processes.first():
            dataset.tokenizer.save(run.tokenizer_path)
        try:
            with ExitStack() as stack:
                trainer = _Trainer(config, run, dataset, mesh, stack)
                return trainer.run_to_end()
        except jax.errors.JaxRuntimeError as problem:
            if not processes.many():
                raise
            raise HeadlabError(
                f"process {jax.process_index()} of {jax.process_count()} lost another one, or its connection "
                f"({str(problem).splitlines()[0][:200]}). Look for the first error of the other processes, and start "
                f"all of them again to resume from the last checkpoint: --workdir={workdir}"
            ) from problem


def _as_recorded(config: Any, recorded: Any) -> Any:
    """`config` with what an earlier call made of its "auto" options, which only the corpus can tell."""
    given, earlier = configs.flatten(config), configs.flatten(recorded)
    open_keys = [key for key, value in given.items() if value == "auto" and key in earlier]
    return configs.replace(config, {key: earlier[key] for key in open_keys})


def _check_model(config: Any) -> None:
    """Raises UsageError for options that the model refuses, before the corpus is opened."""
    size = config.data.vocab_size
    jax.eval_shape(lambda: models.split(models.build(config, size, token_counts=np.ones(size)))[1])


class _Trainer:
    """What one call of `train` keeps open."""

    def __init__(self, config, run, dataset, mesh, stack: ExitStack):
        self.config, self.run, self.mesh = config, run, mesh
        self.store = dataset.store
        self.vocab_size = dataset.tokenizer.vocab_size
        self.batches = data.TrainBatches(
            self.store.tokens("train"), config.data.seq_len, config.train.batch_size, config.seed
        )
        self.clock = Clock()
        self.checkpoints = stack.enter_context(
            Checkpoints(run.checkpoints_dir, keep=config.checkpoint.keep)
        )
        self.stop = stack.enter_context(stop_signals())
        self.stack = stack
        self.writers: list[Writer] = []
        self.spent_before = 0.0
        self.evaluated: tuple[int, dict[str, Any]] | None = None  # the last evaluation and its step
        self.held_out: list[float] = []  # the losses of all evaluations so far

    def run_to_end(self) -> dict[str, Any]:
        with self.clock.part("start"):
            number, state, start = self._restore()
            if processes.first():
                self.writers = open_writers(self.config, self.run, start if start else None)
            for writer in self.writers:
                self.stack.callback(writer.close)
            processes.barrier("metrics are cut back to the restored step")
            records = self.run.metrics()
            self.held_out = [r["validation/loss"] for r in records if "validation/loss" in r]
        phases = phases_of(self.config)
        while True:
            head_name, end = phases[number]
            with self.clock.part("start"):
                phase, fresh = self._phase(head_name, end)
                state = fresh if state is None else state
                if number and int(state.step) == phases[number - 1][1]:
                    state = untie(state, fresh)
                specs = state_specs(phase, self.config, self.mesh, state)
                state = sharding.place(state, self.mesh, specs)
                del fresh
            evaluator = Evaluator(
                phase.graph,
                self.store,
                self.mesh,
                specs.params,
                seq_len=self.config.data.seq_len,
                batch_size=self.config.eval.batch_size,
            )
            state = self._train_phase(phase, specs, state, evaluator)
            number += 1
            if number == len(phases):
                return self._finish(phase, state, evaluator)

    def _phase(self, head_name: str, end: int) -> tuple[Phase, TrainState]:
        return make_phase(
            self.config,
            self.vocab_size,
            self.store.counts,
            head_name=head_name,
            end=end,
            shards=self.mesh.shape[VOCAB],
        )

    def _restore(self) -> tuple[int, TrainState | None, int]:
        """(phase number, state, step) of the latest good checkpoint; (0, None, 0) at the start."""
        if self.checkpoints.latest_step() is None:
            return 0, None, 0
        phases = phases_of(self.config)

        def target(step: int) -> TrainState:
            made: list[Phase] = []

            def fresh():
                phase, state = self._phase(*phases[phase_at(self.config, step)])
                made.append(phase)
                return state

            shapes = jax.eval_shape(fresh)
            specs = state_specs(made[0], self.config, self.mesh, shapes)
            return sharding.abstract(shapes, self.mesh, specs)

        state, metadata, step = self.checkpoints.restore(target, vocab_size=self.vocab_size)
        for bad, reason in self.checkpoints.bad:
            _say(
                self.config, f"The checkpoint of step {bad} was damaged and moved aside: {reason}."
            )
        self.spent_before = metadata["wall_seconds"]
        _say(self.config, f"Resuming {self.run.path} from step {step:,}.")
        number = phase_at(self.config, step)
        # Between the end of one phase and the first step of the next, the next one begins.
        return number + (step == phases[number][1] and number + 1 < len(phases)), state, step

    def _train_phase(
        self, phase: Phase, specs: TrainState, state: TrainState, evaluator: Evaluator
    ) -> TrainState:
        config = self.config
        step = int(state.step)
        if step >= phase.end:
            return state
        with self.clock.part("compile"):
            example = self._batch(step)
            jitted = jax.jit(train_step(phase, config, self.mesh, specs), donate_argnums=0)
            compiled = jitted.lower(state, example).compile()
        speed = Speed(config, phase, self.mesh)
        pending = None
        while step < phase.end:
            with self.clock.part("data"):
                batch = self._batch(step)
            with self.clock.part("step"):
                state, report = compiled(state, batch)
                if pending is not None:
                    # Waits for the step before, not for this one.
                    self._check_finite(phase, pending)
            step, pending = step + 1, report
            last = step == config.train.steps
            log = step % config.log.every == 0 or last
            evaluate = step % config.eval.every == 0 or last
            # Asked once: a signal that comes later waits for the next step, and with many processes for the next log,
            # where they agree.
            stopping = bool(self.stop) if not processes.many() else log and self._agree_to_stop()
            save = step % config.checkpoint.every == 0 or step == phase.end or stopping
            if not (log or evaluate or save):
                continue
            with self.clock.part("step"):
                self._check_finite(phase, report)
            if log:
                with self.clock.part("metrics"):
                    self._write(step, {**_train_record(report), **speed.record(step)})
            held_out = None
            if evaluate:
                with self.clock.part("evaluation"):
                    held_out = self._evaluate(state, evaluator, step)
                    save = save or held_out[1]
                speed.pause(step)
            if save:
                with self.clock.part("checkpoint"):
                    self._save(step, state, phase, held_out and held_out[0])
            if stopping and not last:
                self._interrupted(step)
        return state

    def _batch(self, step: int) -> tuple[Any, ...]:
        """The batch of a step, of which each process reads the rows of its own devices."""

        def read(rows: slice):
            return tuple(self.batches.batch(step, rows))

        return processes.spread(read, self.config.train.batch_size, self.mesh, sharding.BY_BATCH)

    def _agree_to_stop(self) -> bool:
        stopping = processes.any_says(bool(self.stop))
        if stopping and not self.stop:
            self.stop.append(signal.SIGTERM)  # another process was told to
        return stopping

    def _evaluate(self, state: TrainState, evaluator: Evaluator, step: int) -> tuple[float, bool]:
        """(held-out loss, whether it is the best so far), written to the metrics."""
        found = evaluator((state.params, state.constants), "validation")
        self.evaluated = (step, found)
        if not math.isfinite(found["loss"]):
            raise HeadlabError(
                f"the held-out loss after step {step:,} is {found['loss']}, though training was finite; "
                f"the last good checkpoint is step {self.checkpoints.latest_step()}. Evaluate it to look for the cause."
            )
        record = {f"validation/{key}": found[key] for key in ("loss", "bits_per_byte", "bands")}
        self._write(step, record)
        best = all(found["loss"] < loss for loss in self.held_out)
        self.held_out.append(found["loss"])
        return found["loss"], best

    def _save(self, step: int, state: TrainState, phase: Phase, held_out: float | None):
        metadata = {
            "head": phase.head_name,
            "phase": phase_at(self.config, step),
            "vocab_size": self.vocab_size,
            "wall_seconds": self.spent_before + self.clock.total(),
        }
        for writer in self.writers:
            writer.flush()  # what the checkpoint makes final must not be lost
        self.checkpoints.save(step, state, metadata, held_out=held_out)

    def _interrupted(self, step: int):
        number = self.stop[0]
        self.checkpoints.wait()
        raise Interrupted(
            f"stopped by {signal.Signals(number).name} after step {step:,} of {self.config.train.steps:,}, "
            f"which is saved. Run the same command again to resume: --workdir={self.run.path}",
            number,
        )

    def _check_finite(self, phase: Phase, report: dict[str, jax.Array]) -> None:
        bad = int(report["bad_step"])
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

    def _write(self, step: int, record: dict[str, Any]) -> None:
        for writer in self.writers:
            writer.write(step, record)

    def _finish(self, phase: Phase, state: TrainState, evaluator: Evaluator) -> dict[str, Any]:
        """Reads the test split, once, and writes result.json."""
        config = self.config
        self.checkpoints.wait()
        with self.clock.part("evaluation"):
            # A run that was killed between its last checkpoint and its result has not evaluated here.
            step, final = self.evaluated or (None, None)
            if step != config.train.steps or final is None:
                final = evaluator((state.params, state.constants), "validation")
            test = evaluator((state.params, state.constants), "test")
        if processes.first():
            self._write_result(phase, final, test)
        processes.barrier("the result is written")
        result = self.run.result()
        if result is None:
            raise HeadlabError(
                f"{self.run.result_path} cannot be read by process {jax.process_index()}: all processes must see the "
                "run directory, on a file system that they share."
            )
        return result

    def _write_result(self, phase: Phase, final: dict[str, Any], test: dict[str, Any]) -> None:
        config, records = self.config, self.run.metrics()
        held_out = [(r["validation/loss"], r["step"]) for r in records if "validation/loss" in r]
        best_loss, best_step = min(held_out)
        counts = self.store.meta["splits"]
        seconds = self.clock.total()
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
            "wall_seconds": self.spent_before + seconds,
            "timing": timing,
            "config_hash": configs.config_hash(config),
            "seed": config.seed,
            "environment": environment(),
        }
        self.run.write_result(result)
        shares = ", ".join(f"{part} {share:.1%}" for part, share in timing["shares"].items())
        outside = timing["outside_step"]
        if outside is not None:
            shares += f"; data, metrics and checkpoints took {outside:.1%} of training"
        _say(config, f"{seconds:.1f} s: {shares}.")


def _train_record(report: dict[str, jax.Array]) -> dict[str, float]:
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


def _say(config, message: str) -> None:
    if config.log.progress and processes.first():
        print(message, file=sys.stderr)
