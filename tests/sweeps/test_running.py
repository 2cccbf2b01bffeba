"""A sweep from start to end: what is kept, resumed, tried again and waited for. Jobs run in this process."""

import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from sweep_table import table

from headlab import sweeps, training
from headlab.errors import HeadlabError, UsageError
from headlab.runs import RunDirectory
from headlab.sweeps import running
from headlab.sweeps.directory import SweepDirectory
from headlab.training import Interrupted

SEEDS = 'values("seed", range(2))'
# so large a rate gives a loss that is not finite
FAILING = 'chain(values("seed", [0]), values("optimizer.peak_rate", [1e30]), values("seed", [1]))'


class Done:
    """A job that has ended, and what it returned."""

    job_id = "0"

    def __init__(self, returned, log):
        self.returned = returned
        self.paths = SimpleNamespace(stdout=log)


class Here:
    """A launcher whose jobs have ended when it has started them."""

    bound = True

    def __init__(self, directory, slots):
        self.slots = slots
        self.started = []
        self._directory = directory
        Here.last = self

    def share(self, slot):
        return {}

    def start(self, jobs):
        self.started += [name for name, _ in jobs]
        logs = [self._directory.logs_path(name) / "1_0_log.out" for name, _ in jobs]
        return [Done(self.outcome(job), log) for (_, job), log in zip(jobs, logs, strict=True)]

    def done(self, started):
        return True

    def queued(self, started):
        return False

    def returned(self, started):
        return started.returned

    def outcome(self, job):
        kept = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            return type(job)(job.workdir, job.configs)()  # without the watch over this very process
        finally:
            for kind, handler in kept.items():
                signal.signal(kind, handler)

    def stop(self, started):
        pass


@pytest.fixture
def here(monkeypatch):
    """Runs jobs in this process."""
    monkeypatch.setattr(running, "Local", Here)
    return Here


@pytest.mark.slow
def test_every_point_is_trained_as_headlab_train_trains_it(here, plan, tmp_path):
    given = plan('values("head.name", ["tied", "untied"])')
    statuses = sweeps.run(given, str(tmp_path / "sweep"))
    assert [status.state for status in statuses] == ["finished", "finished"]
    assert statuses[0].held_out is not None and statuses[0].step == 12
    for point in given.points:
        training.train(point.config, str(tmp_path / "apart" / point.name))
    assert table(given, tmp_path / "sweep") == table(given, tmp_path / "apart")


def test_a_failing_point_is_named_and_stops_no_other_and_is_retried_only_when_asked(
    here, plan, tmp_path, capsys
):
    given, workdir = plan(FAILING), str(tmp_path / "sweep")
    states = {status.name: status for status in sweeps.run(given, workdir)}
    assert [status.state for status in states.values()] == ["finished", "failed", "finished"]
    assert "not finite in step" in states["peak_rate=1e+30"].error
    assert "peak_rate=1e+30: failed" in capsys.readouterr().err
    failure = SweepDirectory(workdir).failure("peak_rate=1e+30")
    assert failure["kind"] == "HeadlabError" and "Traceback" in failure["traceback"]

    again = sweeps.run(given, workdir)
    assert here.last.started == []
    assert [status.state for status in again] == ["finished", "failed", "finished"]
    sweeps.run(given, workdir, retry=True)
    assert here.last.started == ["peak_rate=1e+30"]


def test_a_dry_run_starts_and_writes_nothing(here, plan, tmp_path, monkeypatch):
    monkeypatch.setattr(here, "start", None)
    workdir = tmp_path / "sweep"
    statuses = sweeps.statuses(plan(SEEDS), str(workdir))
    assert [(status.name, status.state) for status in statuses] == [
        ("seed=0", "new"),
        ("seed=1", "new"),
    ]
    assert not workdir.exists()


@pytest.mark.slow
def test_an_interrupted_point_says_its_step_and_goes_on_and_added_points_are_trained(
    here, plan, tmp_path, monkeypatch
):
    given, workdir = plan(SEEDS), tmp_path / "sweep"
    whole = tmp_path / "whole"
    sweeps.run(given, str(whole))
    with monkeypatch.context() as patched:
        stop_at(patched, 7)
        patched.setattr(here, "outcome", told_both)
        with pytest.raises(
            Interrupted, match=r"stopped by SIGTERM \(1 interrupted, 1 new\).*--workdir="
        ):
            sweeps.run(given, str(workdir))
    statuses = sweeps.statuses(given, str(workdir))
    assert [(status.state, status.step) for status in statuses] == [("interrupted", 8), ("new", 0)]
    more = plan('values("seed", range(3))')
    sweeps.run(more, str(workdir))
    assert here.last.started == ["seed=0", "seed=1", "seed=2"]
    assert table(given, workdir) == table(given, whole)


def told_both(self, job, outcome=Here.outcome):
    """A job that a signal stops, which reaches the sweep, too."""
    ended = outcome(self, job)
    assert ended == "interrupted"
    signal.raise_signal(signal.SIGTERM)
    return ended


def stop_at(monkeypatch, step):
    """SIGTERM to this process when the batch of a step is read."""
    from headlab.data import TrainBatches

    original = TrainBatches.batch

    def batch(self, number, *rows):
        if number == step:
            signal.raise_signal(signal.SIGTERM)
        return original(self, number, *rows)

    monkeypatch.setattr(TrainBatches, "batch", batch)


def test_a_process_that_ends_without_a_word_is_a_failure_that_says_where_its_log_ends(
    here, plan, tmp_path, monkeypatch
):
    def outcome(self, job):
        logs = SweepDirectory(job.workdir).logs_path(job.configs[0][0])
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "1_0_log.out").write_text("something\nlast words\n")
        return None

    monkeypatch.setattr(here, "outcome", outcome)
    (status,) = sweeps.run(plan('values("seed", [0])'), str(tmp_path / "sweep"))
    assert status.state == "failed"
    assert "ended without finishing" in status.error and "last words" in status.error


def test_a_run_that_another_process_writes_is_waited_for(here, plan, tmp_path, monkeypatch):
    given, workdir = plan(SEEDS), tmp_path / "sweep"
    run = RunDirectory(workdir / "seed=0")
    SweepDirectory(workdir).write(given, [])
    RunDirectory.create_or_open(run.path, given.points[0].config)
    program = (
        "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(run.lock_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline() == b"held\n"
    seen = []
    original = running._Crew.show

    def show(self):
        found = original(self)
        seen.append([status.state for status in found])
        if found[1].state == "finished" and holder.poll() is None:
            assert found[0].state == "waiting"
            holder.kill()
            holder.wait()
        return found

    monkeypatch.setattr(running._Crew, "show", show)
    statuses = sweeps.run(given, str(workdir))
    assert here.last.started == ["seed=1", "seed=0"]
    assert [status.state for status in statuses] == ["finished", "finished"]
    assert ["waiting", "finished"] in seen


def test_slurm_that_is_not_there_is_refused_before_anything_is_written(plan, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UsageError, match=r"sbatch, srun, squeue and scancel.*not on the PATH.*--launcher=local"
    ):
        sweeps.run(plan(SEEDS), str(tmp_path / "sweep"), slurm=sweeps.SlurmOptions())
    assert not (tmp_path / "sweep").exists()


def test_heads_that_refuse_their_options_are_named_before_anything_starts(here, plan, tmp_path):
    given = plan('values("head.rank", [4, 99])', head__name="low_rank")
    with pytest.raises(UsageError, match=r"the point rank=99: .*rank is 99"):
        sweeps.run(given, str(tmp_path / "sweep"))
    assert not (tmp_path / "sweep").exists()


def test_the_data_is_prepared_once_before_the_points(here, plan, tmp_path, monkeypatch):
    opened = []
    original = running.data.open_dataset

    def open_dataset(config, **options):
        opened.append((config.vocab_size, len(here.last.started)))
        return original(config, **options)

    monkeypatch.setattr(running.data, "open_dataset", open_dataset)
    monkeypatch.setattr(here, "outcome", lambda self, job: "interrupted")
    grid = 'product(values("data.vocab_size", [290, 300]), values("seed", [0, 1]))'
    sweeps.run(plan(grid), str(tmp_path / "sweep"))
    assert opened == [(290, 0), (300, 0)]


@pytest.mark.slow
def test_stacked_points_leave_the_runs_that_separate_ones_do(here, plan, tmp_path, capsys):
    grid = 'product(values("head.name", ["tied", "adaptive"]), values("seed", range(2)))'
    given = plan(grid)
    sweeps.run(given, str(tmp_path / "sweep"), vectorized=True)
    assert here.last.started == ["head=tied,seed=0", "head=adaptive,seed=0", "head=adaptive,seed=1"]
    assert (
        "head=adaptive,seed=0 is trained by itself: head.name=adaptive: how long"
        in capsys.readouterr().err
    )
    results = {
        point.name: RunDirectory(tmp_path / "sweep" / point.name).result() for point in given.points
    }
    assert [result["runs_together"] for result in results.values()] == [2, 2, 1, 1]
    apart = training.train(given.points[1].config, str(tmp_path / "apart"))
    assert results["head=tied,seed=1"]["validation"]["loss"] == pytest.approx(
        apart["validation"]["loss"], abs=1e-5
    )
    with pytest.raises(UsageError, match=r"can stack no point.*loops"):
        sweeps.run(
            plan('values("head.name", ["adaptive"])'), str(tmp_path / "other"), vectorized=True
        )


def test_a_failed_job_is_told_apart_from_a_stopped_one(here, plan, tmp_path, monkeypatch):
    monkeypatch.setattr(here, "outcome", lambda self, job: "interrupted")
    statuses = sweeps.run(plan(SEEDS), str(tmp_path / "sweep"))
    assert [status.state for status in statuses] == ["new", "new"]
    assert SweepDirectory(tmp_path / "sweep").failure("seed=0") is None
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["format"] == 1
    assert issubclass(Interrupted, HeadlabError)
