"""Sweeps on Slurm: what it is asked for, and that its jobs end as those of this machine do, whatever happens."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import small_cluster
import submitit  # here, for it sets logging up, which must not happen while a test captures
from sweep_table import table

from headlab import sweeps
from headlab.errors import HeadlabError, UsageError
from headlab.runs import RunDirectory
from headlab.sweeps import SlurmOptions, launchers, running
from headlab.sweeps.directory import SweepDirectory
from headlab.sweeps.job import SECONDS_TO_SAVE, Job
from headlab.sweeps.launchers import Slurm
from headlab.training import train

SEEDS = 'values("seed", range(3))'


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """The folder of a small cluster, whose commands are the ones on the PATH."""
    commands = tmp_path / "bin"
    (commands / "cluster").mkdir(parents=True)
    text = Path(small_cluster.__file__).read_text()
    for name in ("sbatch", "srun", "squeue", "scancel", "scontrol"):
        (commands / name).write_text(f"#!{sys.executable} -SE\n{text}")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    monkeypatch.setattr(launchers, "_ASK", 0.2)
    folder = commands / "cluster"
    yield folder
    (folder / "over").touch()
    wait_until(lambda: all(Path(f"{script}.ended").exists() for script in folder.glob("*.sh")))


@pytest.fixture
def directory(tmp_path):
    return SweepDirectory(tmp_path / "sweep")


def jobs(directory, names):
    return [(name, Job(str(directory.path), ((name, "{}"),))) for name in names]


def wait_until(happened, seconds=120):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_slurm_gets_one_array_with_what_each_job_needs(directory, cluster):
    options = SlurmOptions(partition="gpu", gpus=1, cpus=4, memory_gb=16, minutes=90)
    launcher = Slurm(directory, 1, options)
    (cluster / "drained").touch()
    (cluster / "away").touch()  # nothing of it is needed to start jobs
    started = launcher.start(jobs(directory, "ab"))
    assert [job.job_id for job in started] == ["1_0", "1_1"]
    script = (cluster / "1.sh").read_text()
    for line in (
        "--array=0-1%1",
        "--partition=gpu",
        "--gpus-per-node=1",
        "--cpus-per-task=4",
        "--mem=16GB",
        "--time=90",
        f"--signal=USR2@{SECONDS_TO_SAVE}",
    ):
        assert f"#SBATCH {line}\n" in script
    assert launcher.share(0) == {"minutes": 90}


def test_jobs_that_slurm_refuses_are_an_error_with_its_words(directory, cluster):
    (cluster / "refused").write_text("sbatch: error: invalid partition specified: gpuu")
    launcher = Slurm(directory, 1, SlurmOptions(partition="gpuu"))
    with pytest.raises(HeadlabError, match=r"sbatch refused the jobs.*gpuu.*Nothing was started"):
        launcher.start(jobs(directory, "a"))


def test_too_short_a_time_is_refused(directory, cluster):
    with pytest.raises(UsageError, match=r"--minutes=2 is too short.*90 seconds.*at least 3"):
        Slurm(directory, 1, SlurmOptions(minutes=2))
    assert not directory.path.exists()


def test_a_job_is_over_when_it_returned_or_left_the_queue(directory, cluster):
    """A controller that is away for a while, or one answer without a job, ends nothing."""
    launcher = Slurm(directory, 1, SlurmOptions())
    for name in ("away", "drained"):
        (cluster / name).touch()
    (started,) = launcher.start(jobs(directory, "a"))
    folder = cluster / started.job_id
    for _ in range(5):
        assert not launcher.done(started) and not launcher.queued(started)
        time.sleep(0.21)
    (cluster / "away").unlink()
    time.sleep(0.21)
    assert launcher.queued(started)
    assert Slurm(directory, 1, SlurmOptions()).found(started.job_id).job_id == started.job_id

    (cluster / "drained").unlink()
    wait_until((folder / "pid").exists)
    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
    wait_until(lambda: launcher.done(started))
    assert launcher.returned(started) is None
    assert Slurm(directory, 1, SlurmOptions()).found(started.job_id) is None


def test_what_slurm_interrupted_is_done_when_slurm_does_not_start_it_again(directory, cluster):
    launcher = Slurm(directory, 1, SlurmOptions())
    assert launcher.found("7") is None  # no such job
    (cluster / "7").mkdir()
    (cluster / "7" / "state").write_text("PD")
    time.sleep(0.21)
    started = launcher.found("7")
    started.paths.folder.mkdir(parents=True, exist_ok=True)

    def returns(outcome):
        submitit.core.utils.cloudpickle_dump(("success", outcome), started.paths.result_pickle)

    returns("interrupted")
    assert not launcher.done(started) and launcher.queued(started)
    assert launcher.found("7") is not None
    returns("ended")
    assert launcher.done(started) and launcher.found("7") is None
    returns("interrupted")
    (cluster / "7" / "state").unlink()
    time.sleep(0.21)
    assert launcher.done(started) and launcher.returned(started) == "interrupted"
    assert launcher.found("7") is None


def test_a_point_is_trained_to_its_end(plan, cluster, tmp_path):
    given, workdir = plan('values("seed", [0])'), tmp_path / "sweep"
    (status,) = sweeps.run(given, str(workdir), slurm=SlurmOptions())
    assert status.state == "finished" and status.step == 12
    assert RunDirectory(workdir / "seed=0").result()["steps"] == 12
    assert not list((workdir / "sweep").glob("*/job.json"))  # nothing to be found again


@pytest.mark.slow
def test_points_are_trained_as_elsewhere_and_a_killed_one_is_named(plan, cluster, tmp_path, capsys):
    given, workdir = plan(SEEDS, train__steps=200, eval__every=100), tmp_path / "sweep"
    names = [point.name for point in given.points]

    def kill():  # the second, when it has begun
        job = cluster / "1_1"
        wait_until(lambda: len(RunDirectory(workdir / names[1]).metrics()) > 3)
        os.kill(int((job / "pid").read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    statuses = sweeps.run(given, str(workdir), jobs=2, slurm=SlurmOptions())
    killer.join()
    assert [status.state for status in statuses] == ["finished", "failed", "finished"]
    assert "it was killed" in statuses[1].error
    shown = capsys.readouterr().err
    assert f"{names[2]}: queued" in shown and f"{names[1]}: failed" in shown
    log = (workdir / "sweep" / "slurm" / "1_1_0_log.out").read_text()
    assert log.splitlines()[-1] in statuses[1].error

    again = sweeps.run(given, str(workdir), slurm=SlurmOptions(), retry=True)
    assert [status.state for status in again] == ["finished"] * 3
    train(given.points[1].config, str(tmp_path / "apart" / names[1]))
    alone = given._replace(points=given.points[1:2])
    assert table(alone, workdir) == table(alone, tmp_path / "apart")


@pytest.mark.slow
def test_a_job_whose_time_is_up_saves_and_goes_on_where_it_was(plan, cluster, tmp_path):
    """It is warned once, in the middle of its steps; checkpoints are rare."""
    rare = {"checkpoint__every": 399, "eval__every": 200, "log__progress": True}
    given = plan('values("seed", [0])', train__steps=400, **rare)
    workdir = tmp_path / "sweep"
    run = RunDirectory(workdir / given.points[0].name)

    def warn():
        wait_until(lambda: len(run.metrics()) > 30)
        os.kill(int((cluster / "1" / "pid").read_text()), signal.SIGUSR2)

    warner = threading.Thread(target=warn)
    warner.start()
    (status,) = sweeps.run(given, str(workdir), slurm=SlurmOptions())
    warner.join()
    assert status.state == "finished"
    assert (cluster / "1" / "starts").read_text() == "xx"
    log = (workdir / "sweep" / "slurm" / "1_0_log.out").read_text()
    (resumed,) = [line for line in log.splitlines() if line.startswith("Resuming")]
    assert int(resumed.rstrip(".").rpartition(" ")[2]) > 30
    train(given.points[0].config, str(tmp_path / "apart" / given.points[0].name))
    assert table(given, workdir) == table(given, tmp_path / "apart")


@pytest.mark.slow
def test_a_job_that_has_no_time_for_one_step_gives_up(plan, cluster, tmp_path, monkeypatch):
    given, workdir = plan('values("seed", [0])'), tmp_path / "sweep"
    held, _ = RunDirectory.create_or_open(workdir / "seed=0", given.points[0].config)
    SweepDirectory(workdir).write(given, [])

    def warn():  # while it waits for a run that this process holds
        log = workdir / "sweep" / "slurm" / "1_0_log.out"
        wait_until(lambda: log.exists() and "Loading" in log.read_text())
        time.sleep(5)
        os.kill(int((cluster / "1" / "pid").read_text()), signal.SIGUSR2)

    monkeypatch.setattr(running._Crew, "_is_held", lambda self, task: False)
    warner = threading.Thread(target=warn)
    with held.lock():
        warner.start()
        (status,) = sweeps.run(given, str(workdir), slurm=SlurmOptions(minutes=3))
    warner.join()
    assert status.state == "failed"
    assert "the 3 minutes that the cluster gives a job ended before a step" in status.error
    assert (cluster / "1" / "starts").read_text() == "x"


@pytest.mark.slow
def test_jobs_outlive_the_sweep_which_finds_them_again_or_stops_them(
    sweep_file, small_corpus, cluster, tmp_path
):
    path = sweep_file(
        'values("seed", range(2))', train__steps=2000, checkpoint__every=100, eval__every=1000
    )
    plan = sweeps.plan(path, [("data.corpus", small_corpus)])
    workdir = tmp_path / "sweep"
    command = [sys.executable, "-m", "headlab.cli", "sweep", f"--config={path}"]
    command += [f"--workdir={workdir}", f"--config.data.corpus={small_corpus}"]
    command += ["--launcher=slurm"]
    first = RunDirectory(workdir / plan.points[0].name)

    said = tmp_path / "said"

    def begin(*flags):
        return subprocess.Popen(
            [*command, *flags], stdout=subprocess.DEVNULL, stderr=said.open("wb")
        )

    process = begin()
    wait_until(lambda: len(first.metrics()) > 5)
    process.kill()
    process.wait()
    before = len(first.metrics())
    wait_until(lambda: len(first.metrics()) > before)  # the job goes on

    process = begin()  # takes up what runs, queues nothing anew, and is told to stop
    wait_until(lambda: "running" in said.read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 128 + signal.SIGINT
    assert "1 interrupted, 1 new" in said.read_text()
    assert len(list(cluster.glob("*.sh"))) == 1
    assert not list(cluster.glob("*/state"))

    process = begin("--jobs=2")
    assert process.wait(timeout=300) == 0
    assert len(list(cluster.glob("*.sh"))) == 2
    apart = train(plan.points[0].config, str(tmp_path / "apart"))
    assert first.result()["validation"] == apart["validation"]
