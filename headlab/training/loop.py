"""The training loop: from a config and a directory to a finished run, resumable to the same bits at any kill."""

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import numpy as np

from headlab import config as configs
from headlab import data, models, processes, sharding
from headlab.errors import HeadlabError
from headlab.ops.shards import VOCAB
from headlab.runs import RunDirectory, phase_at, phases_of
from headlab.training.evaluation import Evaluator
from headlab.training.lanes import Alone, Lanes, Stacked
from headlab.training.recorder import Recorder, say, train_record
from headlab.training.stacking import check_stack, last_common_step
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
    results, failures = _train([(configs.resolve(config), workdir)])
    for failure in failures.values():
        raise failure
    (result,) = results.values()
    return result


def train_stacked(
    runs: Sequence[tuple[Any, str]],
) -> tuple[dict[str, dict[str, Any]], dict[str, HeadlabError]]:
    """Trains (config, directory) pairs that differ in seed and peak rate alone as one program, mapped over the runs.

    Each leaves a run directory as `train` does, with numbers that differ from those of `train` by float32 rounding.
    A run whose loss is not finite ends; the others go on. A call that was stopped is resumed by the same call, from the
    last step that all of its unfinished runs have saved.

    Returns:
      What result.json holds of each finished run, and the failure of each other one, by directory, `str(Path(…))`.

    Raises:
      UsageError: the runs cannot be stacked (see `headlab.training.stacking`), or as in `train`; nothing was started.
      HeadlabError: a checkpoint or metric could not be written.
    """
    resolved = [(configs.resolve(config), workdir) for config, workdir in runs]
    check_stack([config for config, _ in resolved])
    return _train(resolved, stacked=True)


def _train(
    asked: Sequence[tuple[Any, str]], *, stacked: bool = False
) -> tuple[dict[str, dict[str, Any]], dict[str, HeadlabError]]:
    """(results, failures) by directory of runs on the same data and mesh."""
    for config, workdir in asked:
        earlier = RunDirectory(workdir)
        if earlier.config_path.exists():
            # another config is refused before any work
            RunDirectory.create_or_open(workdir, _as_recorded(config, earlier.config()))
    config = asked[0][0]
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.vocab)
    configs.check_mesh(config, dict(mesh.shape))
    if config.data.tokenizer is None:
        _check_model(config)
    dataset = data.open_dataset(config.data, progress=config.log.progress)
    counts = dataset.store.counts
    results: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        runs = []
        for unresolved, workdir in asked:
            config = models.resolve_head(unresolved, dataset.tokenizer.vocab_size, counts)
            run = _opened(config, workdir, stack)
            finished = run.result()
            if finished is not None:
                say(config, f"{workdir} has finished already; its result is returned as it is.")
                results[str(run.path)] = finished
                continue
            if processes.first():
                dataset.tokenizer.save(run.tokenizer_path)
            runs.append((config, run))
        if not runs:
            return results, {}
        processes.barrier("nothing was finished")
        try:
            with ExitStack() as opened:
                trainer = _Trainer(runs, dataset, mesh, opened, stacked=stacked)
                results |= trainer.run_to_end()
                return results, trainer.failures
        except _NothingLeft:
            return results, trainer.failures
        except jax.errors.JaxRuntimeError as problem:
            if not processes.many():
                raise
            raise HeadlabError(
                f"process {jax.process_index()} of {jax.process_count()} lost another one, or its connection "
                f"({str(problem).splitlines()[0][:200]}). Look for the first error of the other processes, and start "
                f"all of them again to resume from the last checkpoint: --workdir={runs[0][1].path}"
            ) from problem


def _opened(config: Any, workdir: str, stack: ExitStack) -> RunDirectory:
    """The run directory, made or opened, and held for writing while `stack` is open."""
    if processes.first():
        RunDirectory.create_or_open(workdir, config)
    processes.barrier("the run directory exists")
    run, differing = RunDirectory.create_or_open(workdir, config)
    if processes.first():
        stack.enter_context(run.lock())
    for key, (old, new) in differing.items():
        say(config, f"{key} is {new!r} from here on; the run was made with {old!r}.")
    return run


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
    """What one call of `train` keeps open. The config is that of the first run; others differ in what is stacked."""

    def __init__(self, runs, dataset, mesh, stack: ExitStack, *, stacked: bool):
        self.config, self.mesh = runs[0][0], mesh
        self.store = dataset.store
        self.vocab_size = dataset.tokenizer.vocab_size
        self.clock = Clock()
        self.recorders = [Recorder(config, run, dataset, self.clock, stack) for config, run in runs]
        self.lanes: Lanes = Stacked([config for config, _ in runs]) if stacked else Alone()
        self.stop = stack.enter_context(stop_signals())
        self.failures: dict[str, HeadlabError] = {}  # by directory; alone, a failure is raised

    def run_to_end(self) -> dict[str, dict[str, Any]]:
        """The results of the runs that do not fail, by directory."""
        with self.clock.part("start"):
            number, state, start = self._restore()
            for recorder in self.recorders:
                recorder.begin(start)
        phases = phases_of(self.config)
        while True:
            head_name, end = phases[number]
            with self.clock.part("start"):
                phase, fresh = self._phase(head_name, end)
                state = fresh if state is None else state
                if number and self._step_of(state) == phases[number - 1][1]:
                    state = untie(state, fresh)
                # Of one run; where runs are stacked the mesh has one device, and nothing is cut.
                specs = state_specs(phase, self.config, self.mesh, self.lanes.split(state)[0])
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
        """The phase, and the fresh states of all runs."""
        made = [
            make_phase(
                recorder.config,
                self.vocab_size,
                self.store.counts,
                head_name=head_name,
                end=end,
                shards=self.mesh.shape[VOCAB],
            )
            for recorder in self.recorders
        ]
        return made[0][0], self.lanes.join([state for _, state in made])

    def _restore(self) -> tuple[int, TrainState | None, int]:
        """(phase number, state, step) of the latest good checkpoint; (0, None, 0) at the start."""
        step = self._first_step()
        if step == 0:
            return 0, None, 0
        phases = phases_of(self.config)

        def target(step: int) -> TrainState:
            made: list[Phase] = []

            def fresh():
                head_name, end = phases[phase_at(self.config, step)]
                phase, state = make_phase(
                    self.config,
                    self.vocab_size,
                    self.store.counts,
                    head_name=head_name,
                    end=end,
                    shards=self.mesh.shape[VOCAB],
                )
                made.append(phase)
                return state

            shapes = jax.eval_shape(fresh)
            specs = state_specs(made[0], self.config, self.mesh, shapes)
            return sharding.abstract(shapes, self.mesh, specs)

        restored = [recorder.restored(target, step) for recorder in self.recorders]
        step = restored[0][1]
        number = phase_at(self.config, step)
        # Between the end of one phase and the first step of the next, the next one begins.
        number += step == phases[number][1] and number + 1 < len(phases)
        return number, self.lanes.join([state for state, _ in restored]), step

    def _first_step(self) -> int | None:
        """The step to go on from: 0 at the start, None for the latest good one."""
        every = [recorder.checkpoints for recorder in self.recorders]
        if self.lanes.with_own:
            return last_common_step(every)
        return 0 if every[0].latest_step() is None else None

    def _train_phase(
        self, phase: Phase, specs: TrainState, state: TrainState, evaluator: Evaluator
    ) -> TrainState:
        config = self.config
        step = self._step_of(state)
        if step >= phase.end:
            return state
        with self.clock.part("compile"):
            example = self._batch(step)
            body = train_step(phase, config, self.mesh, specs, with_own=self.lanes.with_own)
            jitted = jax.jit(self.lanes.mapped(body), donate_argnums=0)
            compiled = jitted.lower(state, example).compile()
        speed = Speed(config, phase, self.mesh, runs=len(self.recorders))
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
                    timing = speed.record(step)
                    for recorder, own in self._each(jax.device_get(report)):
                        recorder.write(step, {**train_record(own), **timing})
            losses: dict[Recorder, float] = {}
            if evaluate:
                with self.clock.part("evaluation"):
                    losses, best = self._evaluate(state, evaluator, step)
                    save = save or best
                speed.pause(step)
            if save:
                with self.clock.part("checkpoint"):
                    for recorder, own in self._each(state):
                        recorder.save(step, own, phase, losses.get(recorder))
            if stopping and not last:
                self._interrupted(step)
        return state

    def _each(self, tree: Any) -> Iterator[tuple[Recorder, Any]]:
        """The runs that have not failed, each with its part of a state or a report."""
        for recorder, own in zip(self.recorders, self.lanes.split(tree), strict=True):
            if str(recorder.run.path) not in self.failures:
                yield recorder, own

    def _step_of(self, state: TrainState) -> int:
        return int(self.lanes.split(state.step)[0])

    def _batch(self, step: int) -> Any:
        """The batches of a step, of which each process reads the rows of its own devices."""

        def of(recorder: Recorder):
            def read(rows: slice):
                return tuple(recorder.batches.batch(step, rows))

            size = self.config.train.batch_size
            return processes.spread(read, size, self.mesh, sharding.BY_BATCH)

        return self.lanes.join([of(recorder) for recorder in self.recorders])

    def _agree_to_stop(self) -> bool:
        stopping = processes.any_says(bool(self.stop))
        if stopping and not self.stop:
            self.stop.append(signal.SIGTERM)  # another process was told to
        return stopping

    def _evaluate(
        self, state: TrainState, evaluator: Evaluator, step: int
    ) -> tuple[dict[Recorder, float], bool]:
        """The held-out loss of each run, and whether one of them is its best so far."""
        losses, improved = {}, False
        for recorder, own in self._each(state):
            with self._failing_alone(recorder):
                losses[recorder], best = recorder.evaluate(own, evaluator, step)
                improved = improved or best
        return losses, improved

    def _check_finite(self, phase: Phase, report: Mapping[str, Any]) -> None:
        for recorder, bad_step in self._each(np.asarray(report["bad_step"])):
            with self._failing_alone(recorder):
                recorder.check_finite(phase, bad_step)

    @contextmanager
    def _failing_alone(self, recorder: Recorder) -> Iterator[None]:
        """A failure in here ends one run of a stack, and everything where no other is left."""
        try:
            yield
        except HeadlabError as problem:
            if not self.lanes.with_own:
                raise
            self.failures[str(recorder.run.path)] = problem
            if len(self.failures) == len(self.recorders):
                raise _NothingLeft from problem

    def _interrupted(self, step: int):
        number = self.stop[0]
        for recorder in self.recorders:
            recorder.checkpoints.wait()
        directories = " ".join(f"--workdir={recorder.run.path}" for recorder in self.recorders)
        raise Interrupted(
            f"stopped by {signal.Signals(number).name} after step {step:,} of {self.config.train.steps:,}, "
            f"which is saved. Run the same command again to resume: {directories}",
            number,
        )

    def _finish(
        self, phase: Phase, state: TrainState, evaluator: Evaluator
    ) -> dict[str, dict[str, Any]]:
        together = len(self.recorders)
        return {
            str(recorder.run.path): recorder.finish(phase, own, evaluator, together=together)
            for recorder, own in self._each(state)
        }


class _NothingLeft(Exception):
    """Every run of a stack has failed."""
