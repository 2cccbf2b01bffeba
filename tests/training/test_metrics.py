"""Promises of the metric writers: exact values, no lost or doubled points, a quiet terminal."""

import io
import json
import math
import resource
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from headlab.config import default_config
from headlab.errors import HeadlabError
from headlab.runs import RunDirectory
from headlab.training import metrics
from headlab.training.metrics import JsonlWriter, TensorBoardWriter, TerminalWriter


def logging_config(**log):
    config = default_config()
    for key, value in log.items():
        config.log[key] = value
    return config


def write_all(writers, points):
    for step, record in points:
        for writer in writers:
            writer.write(step, record)
    for writer in writers:
        writer.close()


def points_shown(directory, key="train/loss"):
    """(step, value) as TensorBoard reads them."""
    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [(point.step, point.value) for point in accumulator.Scalars(key)]


def test_floats_read_back_exactly_whatever_their_type(tmp_path):
    rng = np.random.default_rng(0)
    values = {
        "python": 0.1 + 0.2,
        "tiny": 5e-324,
        "huge": 1.7976931348623157e308,
        "minus zero": -0.0,
        "numpy32": np.float32(rng.standard_normal()),
        "numpy64": np.float64(rng.standard_normal()),
        "jax": jnp.float32(rng.standard_normal()),
        "bfloat16": jnp.bfloat16(1.0078125),
        "array": np.array(2.5, np.float32),
    }
    write_all([JsonlWriter(tmp_path / "metrics.jsonl")], [(4, values)])
    (record,) = RunDirectory(tmp_path).metrics()
    assert list(record) == ["step", *values]
    for key, value in values.items():
        assert record[key] == float(value)
        assert math.copysign(1, record[key]) == math.copysign(1, float(value))


def test_other_values_keep_their_type(tmp_path):
    values = {"n": np.int64(2**53 + 1), "yes": np.bool_(True), "none": None, "text": "é\n"}
    values["bands"] = [np.float32(0.5), 2]
    write_all([JsonlWriter(tmp_path / "metrics.jsonl")], [(4, values | {"step": 4})])
    assert RunDirectory(tmp_path).metrics() == [
        {"step": 4, "n": 2**53 + 1, "yes": True, "none": None, "text": "é\n", "bands": [0.5, 2]}
    ]
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 1


def test_what_is_not_finite_is_null_and_named(tmp_path):
    record = {"loss": float("nan"), "norm": jnp.float32(np.inf), "low": -np.inf, "fine": 1.0}
    record["bands"] = [1.0, np.float32("nan")]
    write_all([JsonlWriter(tmp_path / "metrics.jsonl")], [(4, record)])
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 4,
        "loss": None,
        "norm": None,
        "low": None,
        "fine": 1.0,
        "bands": [1.0, None],
        "non_finite": {"loss": "nan", "norm": "inf", "low": "-inf", "bands[1]": "nan"},
    }


def test_each_record_reaches_the_file_at_once(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    for step in range(3):
        writer.write(step, {"a": step})
        assert RunDirectory(tmp_path).metrics()[-1] == {"step": step, "a": step}
    writer.close()
    writer.close()


def test_a_record_of_another_step_is_refused(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="step 4 says that it is of step 5"):
        writer.write(4, {"step": 5})
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write(1, {"a": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(HeadlabError, match=r"metrics\.jsonl.*Free some space"):
            writer.write(2, {"text": "x" * 500})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    writer.close()
    run = RunDirectory(tmp_path)
    assert run.metrics() == [{"step": 1, "a": 1}]
    run.truncate_metrics(1)
    assert path.read_bytes() == b'{"step": 1, "a": 1}\n'


def losses(first, last, scale=1.0):
    return [
        (step, {"train/loss": scale * step, "text": "no number"}) for step in range(first, last)
    ]


def test_resuming_gives_the_records_and_points_of_an_uninterrupted_run(tmp_path):
    config = logging_config(progress=False)
    run = RunDirectory(tmp_path)
    write_all(metrics.open_writers(config, run, None), losses(0, 8, scale=0.5))
    write_all(metrics.open_writers(config, run, 4), losses(5, 7, scale=0.25))
    write_all(metrics.open_writers(config, run, 2), losses(3, 10, scale=0.125))
    expected = [(0, 0.0), (1, 0.5), (2, 1.0), *((step, step / 8) for step in range(3, 10))]
    assert [(record["step"], record["train/loss"]) for record in run.metrics()] == expected
    assert points_shown(run.events_dir) == expected


def test_beginning_again_keeps_nothing_of_the_attempt_before(tmp_path):
    config = logging_config(progress=False)
    run = RunDirectory(tmp_path)
    write_all(metrics.open_writers(config, run, None), losses(0, 5))
    write_all(metrics.open_writers(config, run, None), losses(0, 3, scale=2.0))
    expected = [(0, 0.0), (1, 2.0), (2, 4.0)]
    assert [(record["step"], record["train/loss"]) for record in run.metrics()] == expected
    assert points_shown(run.events_dir) == expected


KILLED = """
    import os, signal, sys
    from headlab.training.metrics import TensorBoardWriter
    writer = TensorBoardWriter(sys.argv[1], first_step=0)
    for step in range(2000):
        writer.write(step, {"train/loss": float(step)})
        if step == 1500:
            writer.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_points_flushed_before_a_kill_are_there_and_later_ones_are_not_doubled(tmp_path):
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)])
    assert killed.returncode == -signal.SIGKILL
    write_all([TensorBoardWriter(tmp_path, first_step=1501)], losses(1501, 2000))
    assert points_shown(tmp_path) == [(step, float(step)) for step in range(2000)]


def test_scalars_have_the_names_of_the_record_and_timing_can_be_left_out(tmp_path):
    writer = TensorBoardWriter(tmp_path, first_step=0)
    writer.write(3, {"step": 3, "validation/loss": np.float32(1.5), "timing/mfu": 0.25, "b": None})
    writer.close()
    accumulator = EventAccumulator(str(tmp_path)).Reload()
    assert accumulator.Tags()["scalars"] == ["validation/loss", "timing/mfu"]
    assert points_shown(tmp_path, "validation/loss") == [(3, 1.5)]


def test_the_writers_are_those_asked_for(tmp_path, monkeypatch):
    def kinds(**log):
        writers = metrics.open_writers(logging_config(**log), RunDirectory(tmp_path), None)
        for writer in writers:
            writer.close()
        return [type(writer) for writer in writers]

    assert kinds(tensorboard=True, progress=True) == [
        JsonlWriter,
        TensorBoardWriter,
        TerminalWriter,
    ]
    assert kinds(tensorboard=False, progress=True) == [JsonlWriter, TerminalWriter]
    assert kinds(tensorboard=True, progress=False) == [JsonlWriter, TensorBoardWriter]
    found = metrics.importlib.util.find_spec
    monkeypatch.setattr(
        metrics.importlib.util,
        "find_spec",
        lambda name: None if name == "tensorboardX" else found(name),
    )
    assert kinds(tensorboard=True, progress=False) == [JsonlWriter]


def test_without_progress_nothing_is_printed(tmp_path, capfd):
    config = logging_config(progress=False)
    write_all(metrics.open_writers(config, RunDirectory(tmp_path), None), losses(0, 3))
    assert capfd.readouterr() == ("", "")


def terminal(steps, *, live=False, width=100, plain_every=30.0):
    """A terminal writer, what it printed, and the clock that it reads."""
    printed, now = io.StringIO(), SimpleNamespace(seconds=100.0)
    console = Console(file=printed, force_terminal=live, width=width, color_system=None)
    writer = TerminalWriter(
        steps, console=console, plain_every=plain_every, clock=lambda: now.seconds
    )
    return writer, printed, now


def test_a_plain_line_says_how_far_and_how_long(capfd):
    writer, printed, now = terminal(6000)
    writer.write(0, {"validation/loss": 9.0109})
    now.seconds += 1000.0
    writer.write(
        1000,
        {
            "train/loss": 4.21875,
            "timing/tokens_per_second": np.float32(12345.6),
            "timing/mfu": 0.312,
        },
    )
    writer.close()
    assert printed.getvalue().splitlines() == [
        "step 0/6,000  held-out 9.0109",
        "step 1,000/6,000  loss 4.2188  held-out 9.0109  12,346 tokens/s  MFU 31.2%  ETA 1:23:20",
    ]
    assert capfd.readouterr() == ("", "")


def test_plain_lines_come_now_and_then_and_with_each_held_out_loss_and_at_the_end():
    writer, printed, now = terminal(100, plain_every=30.0)
    for step in range(1, 101):
        now.seconds += 1.0
        writer.write(step, {"train/loss": 1.0} | ({"validation/loss": 2.0} if step == 50 else {}))
    writer.close()
    steps = [
        int(line.split("/")[0].removeprefix("step ")) for line in printed.getvalue().splitlines()
    ]
    assert steps == [1, 31, 50, 80, 100]


def test_plain_lines_are_never_broken_or_interpreted():
    writer, printed, _ = terminal(10, width=20)
    writer.write(10, {"train/loss": float("nan"), "validation/loss": 2.0, "timing/mfu": 0.5})
    writer.close()
    assert printed.getvalue() == "step 10/10  loss nan  held-out 2.0000  MFU 50.0%\n"


def test_a_terminal_shows_one_live_line_with_a_bar():
    writer, printed, now = terminal(4, live=True)
    for step in range(1, 5):
        now.seconds += 2.0
        writer.write(step, {"train/loss": 5.0 - step})
    writer.close()
    shown = printed.getvalue()
    assert "━" in shown
    assert "step 3/4  loss 2.0000  ETA 0:02" in shown
    assert shown.rstrip("\x1b[?25h\n").splitlines()[-1].rstrip().endswith("step 4/4  loss 1.0000")


def test_standard_error_that_is_no_terminal_gets_plain_lines(tmp_path, capfd):
    writers = metrics.open_writers(default_config(), RunDirectory(tmp_path), None)
    write_all(writers, losses(1, 2))
    out, err = capfd.readouterr()
    assert (out, err) == ("", "step 1/6,000  loss 1.0000\n")
