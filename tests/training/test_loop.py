"""A run from start to end: resuming to the same bits, stopping, refusing, and what it leaves behind."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from headlab import config as configs
from headlab import runs, training
from headlab.checkpoint_files import read_record, saved_checkpoints
from headlab.errors import HeadlabError, UsageError
from headlab.runs import RunDirectory, restore_model
from headlab.training import loop

SMALL = {
    "data.vocab_size": "300",
    "data.seq_len": "16",
    "model.d_model": "16",
    "model.n_layers": "1",
    "model.dropout": "0.1",
    "train.steps": "60",
    "train.micro_batches": "2",
    "eval.every": "20",
    "eval.batch_size": "64",
    "checkpoint.every": "5",
    "log.every": "2",
    "log.progress": "false",
    "log.tensorboard": "false",
}


def options(corpus, **changes):
    dotted = {key.replace("__", "."): str(value) for key, value in changes.items()}
    return {**SMALL, "data.corpus": corpus, **dotted}


def load(corpus, **changes):
    return configs.load("configs/tiny.py", list(options(corpus, **changes).items()))


def command(workdir, corpus, **changes):
    flags = [f"--config.{key}={value}" for key, value in options(corpus, **changes).items()]
    return [
        sys.executable,
        "-m",
        "headlab.cli",
        "train",
        "--config=configs/tiny.py",
        f"--workdir={workdir}",
        *flags,
    ]


def without_timing(run):
    return [
        {key: value for key, value in record.items() if not key.startswith("timing/")}
        for record in run.metrics()
    ]


def leaves(run, step):
    """The digest of every leaf that a checkpoint holds: parameters, optimizer state, counters."""
    return read_record(run.checkpoints_dir / str(step))["leaves"]


def result_without_timing(run):
    of_the_machine = ("wall_seconds", "timing", "peak_memory")
    return {k: v for k, v in run.result().items() if k not in of_the_machine}


UNTIED_LATE = {"head__untie_at": 0.67}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, small_corpus):
    """A run with late untying and dropout that nothing disturbed, in a process of its own."""
    path = tmp_path_factory.mktemp("undisturbed")
    workdir = path / "run"
    subprocess.run(command(workdir, small_corpus, **UNTIED_LATE), check=True)
    return RunDirectory(workdir)


def wait_for_step(process, run, step):
    """Until the metrics hold a record of `step` or later; False if the process ends before."""
    while process.poll() is None:
        lines = run.metrics_path.read_bytes().split(b"\n")[:-1] if run.metrics_path.exists() else []
        if lines and json.loads(lines[-1])["step"] >= step:
            return True
        time.sleep(0.002)
    return False


@pytest.mark.slow
def test_kill_9_at_random_moments_ends_in_the_same_bits(undisturbed, small_corpus, tmp_path):
    run = RunDirectory(tmp_path / "run")
    rng = random.Random(1)
    moments, kills = 10, 0
    for step in sorted(rng.sample(range(1, 59), moments)):
        process = subprocess.Popen(command(run.path, small_corpus, **UNTIED_LATE))
        if wait_for_step(process, run, step):
            time.sleep(rng.uniform(0, 0.02))
            kills += process.poll() is None
            process.send_signal(signal.SIGKILL)
        process.wait()
    assert kills >= 0.8 * moments  # a kill may come just after the end
    subprocess.run(command(run.path, small_corpus, **UNTIED_LATE), check=True)
    assert without_timing(run) == without_timing(undisturbed)
    assert leaves(run, 60) == leaves(undisturbed, 60)
    assert result_without_timing(run) == result_without_timing(undisturbed)


def test_sigterm_saves_says_how_to_resume_and_resumes_exactly(undisturbed, small_corpus, tmp_path):
    run = RunDirectory(tmp_path / "run")
    process = subprocess.Popen(
        command(run.path, small_corpus, **UNTIED_LATE), stderr=subprocess.PIPE, text=True
    )
    assert wait_for_step(process, run, 7)
    process.send_signal(signal.SIGTERM)
    _, message = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert "SIGTERM" in message and "resume" in message and "Traceback" not in message
    assert run.result() is None
    stopped = max(saved_checkpoints(run.checkpoints_dir))
    assert run.metrics()[-1]["step"] <= stopped < 60
    subprocess.run(command(run.path, small_corpus, **UNTIED_LATE), check=True)
    assert without_timing(run) == without_timing(undisturbed)
    assert leaves(run, 60) == leaves(undisturbed, 60)


def test_the_run_directory_tells_all(undisturbed, small_corpus):
    result = undisturbed.result()
    assert result["head"] == "tied" and result["untied_at"] == 40
    assert result["parameters"]["head"] == 300 * 16
    assert result["steps"] == 60 and result["tokens_seen"] <= 60 * 8 * 16
    assert result["validation"]["tokens"] == result["corpus"]["validation"]["tokens"] - 1
    losses = {
        r["step"]: r["validation/loss"] for r in undisturbed.metrics() if "validation/loss" in r
    }
    assert set(losses) == {20, 40, 60}
    assert result["best"] == min(
        ({"step": s, "loss": x} for s, x in losses.items()), key=lambda b: b["loss"]
    )
    assert result["validation"]["loss"] == losses[60]
    assert losses[60] < losses[20]
    assert result["config_hash"] == configs.config_hash(undisturbed.config())
    assert set(result["environment"]["versions"]) >= {"jax", "flax", "optax", "numpy"}
    outside = result["timing"]["outside_step"]
    assert 0 < outside < 1


def test_checkpoints_are_of_their_phase_and_evaluate_to_the_logged_losses(undisturbed):
    last = restore_model(undisturbed)
    assert (last.head, last.step) == ("untied", 60)
    assert hasattr(last.model.head, "weight")
    found = training.evaluate_run(str(undisturbed.path), batch_size=7)
    assert found["loss"] == pytest.approx(undisturbed.result()["validation"]["loss"], abs=1e-6)
    test = training.evaluate_run(str(undisturbed.path), split="test")
    assert test["loss"] == undisturbed.result()["test"]["loss"]


def test_a_finished_run_is_returned_as_it_is(undisturbed, small_corpus):
    before = undisturbed.metrics_path.read_bytes()
    result = training.train(load(small_corpus, **UNTIED_LATE), str(undisturbed.path))
    assert result == undisturbed.result()
    assert undisturbed.metrics_path.read_bytes() == before


def test_another_config_is_refused_naming_the_keys(undisturbed, small_corpus):
    with pytest.raises(UsageError, match="optimizer.peak_rate"):
        training.train(
            load(small_corpus, optimizer__peak_rate=0.5, **UNTIED_LATE), str(undisturbed.path)
        )


def test_one_compilation_a_phase(small_corpus, tmp_path, monkeypatch):
    traced = []
    original = loop.train_step

    def counting(phase, *arguments, **options):
        body = original(phase, *arguments, **options)

        def counted(*inputs):
            traced.append(phase.head_name)
            return body(*inputs)

        return counted

    monkeypatch.setattr(loop, "train_step", counting)
    training.train(
        load(small_corpus, train__steps=6, optimizer__warmup_steps=1, **UNTIED_LATE),
        str(tmp_path / "run"),
    )
    assert traced == ["tied", "untied"]


def test_resuming_on_another_mesh_logs_the_change_and_stays_close(
    small_corpus, tmp_path, monkeypatch, capsys
):
    """mesh.* may differ between the parts of a run, with other paddings of 300 tokens; results agree to rounding."""
    workdir = str(tmp_path / "run")
    plain = {"train__steps": 10, "train__micro_batches": 1, "model__dropout": 0}
    plain["head__vocab_multiple"] = 25
    # a directory may be written in any way
    whole = training.train(load(small_corpus, **plain), f"{tmp_path}/./whole/")
    stop_after(monkeypatch, 5)
    with pytest.raises(training.Interrupted, match="after step 5 of 10"):
        training.train(load(small_corpus, **plain), workdir)
    monkeypatch.undo()
    result = training.train(
        load(small_corpus, mesh__data=2, mesh__vocab=4, log__progress="true", **plain), workdir
    )
    shown = capsys.readouterr().err
    assert "mesh.data is 2 from here on" in shown and "mesh.vocab is 4 from here on" in shown
    assert result["validation"]["loss"] == pytest.approx(whole["validation"]["loss"], abs=1e-4)
    # the run's own mesh is what it was made with: one device, another padding than that of its last checkpoint
    evaluated = training.evaluate_run(workdir)
    assert evaluated["loss"] == pytest.approx(result["validation"]["loss"], abs=1e-6)


def test_resuming_on_other_cores_says_that_bits_may_differ(
    small_corpus, tmp_path, monkeypatch, capsys
):
    workdir = str(tmp_path / "run")
    config = load(small_corpus, log__progress="true", train__steps=10)
    with monkeypatch.context() as patched:
        patched.setattr("headlab.runs._cores", lambda: 99)
        stop_after(patched, 5)
        with pytest.raises(training.Interrupted, match="after step 5 of 10"):
            training.train(config, workdir)
    capsys.readouterr()
    training.train(config, workdir)
    shown = capsys.readouterr().err
    cores = runs.environment()["cores"]
    assert f"cores is {cores} from here on; the steps before were made with 99" in shown
    assert shown.count("from here on") == 1


def stop_after(monkeypatch, step):
    """Sends this process SIGINT while it makes the update after `step` − 1."""
    original = loop.data.TrainBatches.batch

    def batch(self, s, *rows):
        if s == step - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, s, *rows)

    monkeypatch.setattr(loop.data.TrainBatches, "batch", batch)


@pytest.mark.parametrize("head", ["tied", "untied"])
def test_a_loss_that_is_not_finite_stops_the_run_naming_step_head_and_checkpoint(
    small_corpus, tmp_path, monkeypatch, head
):
    original = loop.data.TrainBatches.batch

    def batch(self, step, *rows):
        found = original(self, step, *rows)
        if step == 12:
            found.targets[0, 0] = 300  # outside the vocabulary
        return found

    monkeypatch.setattr(loop.data.TrainBatches, "batch", batch)
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(HeadlabError, match=rf"step 13 \(head '{head}'\).*step 10 is the last good"):
        training.train(load(small_corpus, head__name=head), str(run.path))
    assert max(saved_checkpoints(run.checkpoints_dir)) == 10
    assert run.metrics()[-1]["step"] <= 12
    assert all(np.isfinite(r["train/loss"]) for r in run.metrics() if "train/loss" in r)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    small_corpus, tmp_path, monkeypatch, capsys
):
    run = RunDirectory(tmp_path / "run")
    whole = RunDirectory(tmp_path / "whole")
    training.train(load(small_corpus, train__steps=12), str(whole.path))
    stop_after(monkeypatch, 11)
    with pytest.raises(training.Interrupted):
        training.train(load(small_corpus, train__steps=12), str(run.path))
    monkeypatch.undo()
    largest = max(
        (p for p in (run.checkpoints_dir / "11").rglob("*") if p.is_file()),
        key=lambda p: p.stat().st_size,
    )
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0x10
    largest.write_bytes(content)
    capsys.readouterr()
    training.train(load(small_corpus, train__steps=12, log__progress="true"), str(run.path))
    shown = capsys.readouterr().err
    assert "checkpoint of step 11 was damaged" in shown and "from step 10" in shown
    assert leaves(run, 12) == leaves(whole, 12)
    assert without_timing(run) == without_timing(whole)


def test_a_run_that_another_process_writes_is_left_alone(small_corpus, tmp_path):
    config = load(small_corpus)
    run, _ = RunDirectory.create_or_open(tmp_path / "run", config)
    with run.lock(), pytest.raises(UsageError, match=str(os.getpid())):
        training.train(config, str(run.path))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"data__corpus": "text:no/such/*.txt"}, "no/such"),
        ({"data__vocab_size": 60000}, "60000|60,000"),
        ({"mesh__data": 64, "train__batch_size": 128}, "64"),
    ],
)
def test_what_cannot_be_done_is_refused_before_a_run_is_made(
    small_corpus, tmp_path, changes, message
):
    workdir = tmp_path / "run"
    with pytest.raises(UsageError, match=message):
        training.train(load(small_corpus, **{"train__micro_batches": 1, **changes}), str(workdir))
    assert not workdir.exists()


def test_evaluating_what_is_not_a_run_or_a_split_is_refused(undisturbed, tmp_path):
    with pytest.raises(UsageError, match="not a run"):
        training.evaluate_run(str(tmp_path))
    with pytest.raises(UsageError, match="holdout"):
        training.evaluate_run(str(undisturbed.path), split="holdout")
    with pytest.raises(UsageError, match="0"):
        training.evaluate_run(str(undisturbed.path), batch_size=0)


def test_the_devices_of_this_test_are_virtual():
    assert jax.device_count() == 8
