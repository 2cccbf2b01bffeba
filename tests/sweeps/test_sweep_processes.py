"""`headlab sweep` with processes of its own: killed and stopped at any moment, it ends with the same table."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from sweep_table import table

from headlab import sweeps
from headlab.runs import RunDirectory

SEEDS = 'values("seed", range(2))'


def command(path, workdir, corpus, *flags):
    return [
        sys.executable,
        "-m",
        "headlab.cli",
        "sweep",
        f"--config={path}",
        f"--workdir={workdir}",
        f"--config.data.corpus={corpus}",
        *flags,
    ]


def wait_until(process, happened):
    """Until something happened, or the process ended."""
    while process.poll() is None and not happened():
        time.sleep(0.002)


@pytest.mark.slow
def test_sigkill_of_the_sweep_at_five_moments_ends_with_the_same_table(
    sweep_file, small_corpus, tmp_path
):
    path = sweep_file(SEEDS, train__steps=400, checkpoint__every=20, eval__every=200)
    plan = sweeps.plan(path, [("data.corpus", small_corpus)])
    whole, workdir = tmp_path / "whole", tmp_path / "sweep"
    first, second = (RunDirectory(workdir / point.name) for point in plan.points)

    def at_step(run, step):
        def reached():
            lines = run.metrics_path.read_bytes().count(b"\n") if run.metrics_path.exists() else 0
            return lines >= step

        return reached

    rng = random.Random(2)
    moments = [
        (workdir / "sweep.json").exists,
        first.config_path.exists,
        at_step(first, rng.randint(1, 100)),
        at_step(first, rng.randint(150, 350)),
        at_step(second, rng.randint(1, 350)),
    ]
    for happened in moments:
        sweep = subprocess.Popen(command(path, workdir, small_corpus), stderr=subprocess.DEVNULL)
        wait_until(sweep, happened)
        assert sweep.poll() is None
        sweep.kill()
        sweep.wait()
    done = subprocess.run(
        command(path, workdir, small_corpus), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "2 finished, of 2 points" in done.stdout
    subprocess.run(command(path, whole, small_corpus, "--jobs=2"), check=True, capture_output=True)
    assert table(plan, workdir) == table(plan, whole)


def test_sigint_stops_the_points_which_save_and_the_exit_code_says_so(
    sweep_file, small_corpus, tmp_path
):
    path = sweep_file(SEEDS, train__steps=100_000, checkpoint__every=50_000, eval__every=50_000)
    plan = sweeps.plan(path, [("data.corpus", small_corpus)])
    workdir = tmp_path / "sweep"
    run = RunDirectory(workdir / plan.points[0].name)
    sweep = subprocess.Popen(
        command(path, workdir, small_corpus),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until(sweep, lambda: run.metrics_path.exists() and run.metrics_path.stat().st_size > 1000)
    os.killpg(sweep.pid, signal.SIGINT)  # as a terminal sends it, to every process
    _, said = sweep.communicate()
    assert sweep.returncode == 128 + signal.SIGINT
    assert "stopped by SIGINT" in " ".join(said.split())
    first, second = sweeps.statuses(plan, str(workdir))
    assert (first.state, second.state) == ("interrupted", "new")
    assert first.step > 0
    assert str(first.step) in [entry.name for entry in run.checkpoints_dir.iterdir()]
    assert not run.is_locked()


@pytest.mark.slow
def test_the_command_names_what_failed_and_a_dry_run_lists_it(sweep_file, small_corpus, tmp_path):
    path = sweep_file('chain(values("optimizer.peak_rate", [1e30]), values("seed", [1]))')
    workdir = tmp_path / "sweep"
    done = subprocess.run(
        command(path, workdir, small_corpus, "--jobs=2"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "peak_rate=1e+30 failed: the loss or its gradient was not finite" in done.stderr
    assert "1 failed, 1 finished, of 2 points" in done.stdout
    listed = subprocess.run(
        command(path, workdir, small_corpus, "--dry-run"),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert [line.split("  ")[0] for line in listed] == ["peak_rate=1e+30", "seed=1"]
    assert "parameters" in listed[0] and "failed: the loss" in listed[0]
    assert listed[1].endswith("parameters  finished")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--partition=gpu"], "--partition is asked of Slurm: add --launcher=slurm"),
        (["--jobs=0"], "not an integer of at least 1"),
        (["--config.sed=1"], "did you mean seed"),
        (["--launcher=slurms"], "did you mean slurm?"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_written(
    sweep_file, small_corpus, tmp_path, flags, message, capsys
):
    from headlab import cli

    workdir = tmp_path / "sweep"
    code = cli.main(command(sweep_file(SEEDS), workdir, small_corpus, *flags)[3:])
    assert code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not workdir.exists()
