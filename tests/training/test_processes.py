"""Two processes on one host train as one, and stop where one of them dies."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from headlab import config as configs
from headlab import processes, training
from headlab.checkpoint_files import saved_checkpoints
from headlab.errors import UsageError
from headlab.runs import RunDirectory

TIMEOUT = 10  # seconds, in place of `processes.TIMEOUT`: a test need not wait so long
OPTIONS = {
    "data.vocab_size": "300",
    "model.d_model": "16",
    "model.n_layers": "1",
    "train.steps": "20",
    "train.batch_size": "8",
    "eval.every": "10",
    "checkpoint.every": "10",
    "log.every": "1",
    "log.progress": "false",
    "mesh.data": "2",
    "mesh.vocab": "2",
}
SCRIPT = f"""
import sys
from headlab import cli, processes
processes.TIMEOUT = {TIMEOUT}
sys.exit(cli.main(sys.argv[1:]))
"""


def start(workdir, corpus, **changed):
    """Both processes, of two devices each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    chosen = (
        OPTIONS | {"data.corpus": corpus} | {k.replace("__", "."): v for k, v in changed.items()}
    )
    command = [
        sys.executable,
        "-c",
        SCRIPT,
        "train",
        "--config=configs/tiny.py",
        *(f"--config.{key}={value}" for key, value in chosen.items()),
        f"--workdir={workdir}",
        "--distributed",
        f"--coordinator=127.0.0.1:{port}",
        "--processes=2",
    ]
    # the last one counts
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    return [
        subprocess.Popen(
            [*command, f"--process-id={number}"],
            env=os.environ | {"XLA_FLAGS": flags},
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]


@pytest.fixture(scope="module")
def alone(small_corpus, tmp_path_factory):
    """The run of one process with four devices."""
    workdir = tmp_path_factory.mktemp("alone") / "run"
    chosen = list((OPTIONS | {"data.corpus": small_corpus}).items())
    training.train(configs.load("configs/tiny.py", chosen), str(workdir))
    return RunDirectory(workdir)


def losses(run):
    return [r["train/loss"] for r in run.metrics() if "train/loss" in r]


def test_two_processes_train_to_the_loss_of_one(alone, small_corpus, tmp_path):
    run = RunDirectory(tmp_path / "run")
    for process in start(run.path, small_corpus):
        _, message = process.communicate(timeout=300)
        assert process.returncode == 0, message
    # Only the order in which devices are summed may differ.
    assert losses(run) == pytest.approx(losses(alone), rel=1e-6)
    assert len(losses(run)) == 20
    one, two = (r.result()["validation"]["loss"] for r in (alone, run))
    assert two == pytest.approx(one, abs=1e-6)
    assert list(saved_checkpoints(run.checkpoints_dir)) == list(
        saved_checkpoints(alone.checkpoints_dir)
    )
    steps = [json.loads(line)["step"] for line in run.metrics_path.read_text().splitlines()]
    assert steps == [r["step"] for r in alone.metrics()]  # each record once


@pytest.mark.slow
def test_the_death_of_one_stops_the_other_and_the_run_resumes(alone, small_corpus, tmp_path):
    run = RunDirectory(tmp_path / "run")
    both = start(run.path, small_corpus, train__steps="100000", optimizer__warmup_steps="1")
    while not saved_checkpoints(run.checkpoints_dir):
        assert all(process.poll() is None for process in both)
        time.sleep(0.05)
    both[1].send_signal(signal.SIGKILL)
    died = time.monotonic()
    _, message = both[0].communicate(timeout=120)
    both[1].communicate()
    assert both[0].returncode != 0
    assert time.monotonic() - died < 3 * TIMEOUT + 10
    assert "another task died" in message or "lost another" in message
    first = min(saved_checkpoints(run.checkpoints_dir))
    # The run was another one; what is asked is that its checkpoint opens and training goes on from there.
    again = start(run.path, small_corpus, train__steps="100000", optimizer__warmup_steps="1")
    while max(saved_checkpoints(run.checkpoints_dir)) <= first + 10:
        assert all(process.poll() is None for process in again)
        time.sleep(0.05)
    for process in again:
        process.send_signal(signal.SIGTERM)
    for process in again:
        _, message = process.communicate(timeout=120)
        assert process.returncode == 128 + signal.SIGTERM, message
    steps = [record["step"] for record in run.metrics()]
    assert steps == sorted(steps)


@pytest.mark.parametrize(
    ("given", "environ", "message"),
    [
        (("node0", 2, 0), {}, "must be HOST:PORT"),
        (("node0:1234", 2, 2), {}, r"process id is 2; it must be in 0 … 1"),
        ((None, None, None), {"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES is 'two'"),
        ((None, None, None), {}, "did not find each other"),
    ],
)
def test_processes_that_cannot_find_each_other_are_told_what_is_missing(given, environ, message):
    with pytest.raises(UsageError, match=message):
        processes.start(*given, environ=environ)


def test_one_process_needs_no_other():
    assert not processes.many() and processes.first()
    assert processes.any_says(True) and not processes.any_says(False)
    processes.barrier("nothing to wait for")
