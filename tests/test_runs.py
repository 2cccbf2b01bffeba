"""Promises of the run directory: what it refuses, what a kill leaves, who may write."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest

from headlab import runs
from headlab.config import default_config, differences
from headlab.errors import HeadlabError, UsageError
from headlab.runs import RunDirectory


@pytest.fixture
def config():
    return default_config()


def changed(config, **sections):
    """A copy of the configuration with `section={"key": value}` in place."""
    copy = default_config()
    for section, values in sections.items():
        for key, value in values.items():
            copy[section][key] = value
    return copy


def test_new_run_records_its_configuration(tmp_path, config):
    run, operational = RunDirectory.create_or_open(tmp_path / "deep" / "run", config)
    assert operational == {}
    assert differences(run.config(), config) == {}
    assert differences(RunDirectory(run.path).config(), config, operational=True) == {}


def test_reopening_with_the_same_configuration_changes_nothing(tmp_path, config):
    run, _ = RunDirectory.create_or_open(tmp_path, config)
    before = run.config_path.read_bytes()
    again, operational = RunDirectory.create_or_open(tmp_path, config)
    assert operational == {}
    assert again.config_path.read_bytes() == before


def test_another_configuration_is_refused_naming_keys_and_both_values(tmp_path, config):
    RunDirectory.create_or_open(tmp_path, config)
    other = changed(config, train={"steps": 123}, optimizer={"peak_rate": 0.5})
    with pytest.raises(UsageError) as refusal:
        RunDirectory.create_or_open(tmp_path, other)
    message = str(refusal.value)
    for part in ("train.steps", "6000", "123", "optimizer.peak_rate", "0.002", "0.5"):
        assert part in message
    assert "another directory" in message


def test_operational_keys_may_differ_and_are_returned(tmp_path, config):
    run, _ = RunDirectory.create_or_open(tmp_path, config)
    before = run.config_path.read_bytes()
    _, operational = RunDirectory.create_or_open(
        tmp_path, changed(config, log={"every": 7}, checkpoint={"keep": 5})
    )
    assert operational == {"checkpoint.keep": (2, 5), "log.every": (10, 7)}
    assert run.config_path.read_bytes() == before


def test_a_directory_of_other_things_is_refused_and_left_alone(tmp_path, config):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        RunDirectory.create_or_open(tmp_path, config)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_place_of_the_directory_is_refused(tmp_path, config):
    (tmp_path / "run").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        RunDirectory.create_or_open(tmp_path / "run", config)


def test_what_a_kill_while_creating_leaves_is_no_obstacle(tmp_path, config):
    (tmp_path / "lock").write_text("process 1 on nowhere\n")
    (tmp_path / ".config.json.new").write_text('{"seed"')
    run, _ = RunDirectory.create_or_open(tmp_path, config)
    assert differences(run.config(), config) == {}


def test_a_directory_without_a_run_says_what_to_name(tmp_path):
    with pytest.raises(UsageError, match=r"no config\.json.*--workdir"):
        RunDirectory(tmp_path / "absent").config()


def test_metrics_of_a_new_run_are_empty(tmp_path):
    assert RunDirectory(tmp_path).metrics() == []
    RunDirectory(tmp_path).truncate_metrics(3)
    assert RunDirectory(tmp_path).metrics() == []


@pytest.mark.parametrize("torn", [b"", b'{"step": 3, "tr', b'{"step"', b"{", b'{"s\xc3', b"\0\0"])
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    run = RunDirectory(tmp_path)
    run.metrics_path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn)
    assert run.metrics() == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("bad", [b"nonsense", b"", b"[1]", b"7", b'{"loss": 1}', b'{"step": "a"}'])
def test_a_bad_line_in_the_middle_is_an_error_with_its_number(tmp_path, bad):
    run = RunDirectory(tmp_path)
    run.metrics_path.write_bytes(b'{"step": 1}\n' + bad + b'\n{"step": 3}\n')
    with pytest.raises(HeadlabError, match="line 2"):
        run.metrics()
    with pytest.raises(HeadlabError, match="line 2"):
        run.truncate_metrics(1)


def test_truncation_keeps_the_bytes_of_what_stays(tmp_path):
    run = RunDirectory(tmp_path)
    lines = [
        b'{"step": 1,   "a": 1.50}',
        b'{"a": "\xc3\xa9", "step": 2}',
        b'{"step": 2, "b": null}',
    ]
    run.metrics_path.write_bytes(b"\n".join([*lines, b'{"step": 3}', b'{"ste']))
    run.truncate_metrics(2)
    assert run.metrics_path.read_bytes() == b"\n".join(lines) + b"\n"


def test_truncation_ends_a_whole_last_record_that_lacks_its_newline(tmp_path):
    run = RunDirectory(tmp_path)
    run.metrics_path.write_bytes(b'{"step": 1}\n{"step": 2}')
    run.truncate_metrics(2)
    assert run.metrics_path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_result_reads_back_and_what_is_not_finite_is_null(tmp_path):
    run = RunDirectory(tmp_path)
    assert run.result() is None
    run.write_result(
        {
            "loss": np.float32(0.1),
            "bits": float("nan"),
            "bands": [1.0, math.inf, (jnp.float32(2.5), -math.inf)],
            "steps": np.int64(3),
            "table": {"nll": jnp.array([1.0, jnp.nan])},
        }
    )
    assert run.result() == {
        "loss": float(np.float32(0.1)),
        "bits": None,
        "bands": [1.0, None, [2.5, None]],
        "steps": 3,
        "table": {"nll": [1.0, None]},
    }


def test_a_result_that_cannot_be_written_leaves_the_earlier_one(tmp_path):
    run = RunDirectory(tmp_path)
    run.write_result({"loss": 1.0})
    program = f"""
        import resource
        from headlab.runs import RunDirectory
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            RunDirectory({str(tmp_path)!r}).write_result({{"text": "x" * 5000}})
        except Exception as problem:
            print(type(problem).__name__, problem)
    """
    printed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    ).stdout
    assert printed.startswith("HeadlabError") and "result.json" in printed
    assert run.result() == {"loss": 1.0}
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_damaged_result_is_an_error_with_the_fix(tmp_path):
    run = RunDirectory(tmp_path)
    run.result_path.write_text('{"loss": ')
    with pytest.raises(HeadlabError, match="Delete it"):
        run.result()


HOLDER = """
    import sys, time
    from headlab.runs import RunDirectory
    with RunDirectory(sys.argv[1]).lock():
        print("held", flush=True)
        time.sleep(600)
"""


def test_a_second_writer_is_refused_until_the_first_is_killed(tmp_path):
    run = RunDirectory(tmp_path)
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            with pytest.raises(UsageError, match=f"process {holder.pid} "), run.lock():
                pass
        finally:
            holder.send_signal(signal.SIGKILL)
    with run.lock():
        pass


def test_the_lock_is_let_go_after_an_error(tmp_path):
    run = RunDirectory(tmp_path)
    with pytest.raises(ZeroDivisionError), run.lock():
        raise ZeroDivisionError
    with run.lock(), pytest.raises(UsageError, match="being written by process"), run.lock():
        pass


def test_environment_is_complete_and_json():
    found = runs.environment()
    assert json.loads(json.dumps(found)) == found
    for package in ("python", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"):
        assert found["versions"][package]
    assert found["versions"]["numpy"] == np.__version__
    assert found["device_count"] >= 1 and found["device_kind"]
    assert 1 <= found["cores"] <= os.cpu_count()


def test_cores_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 8}, raising=False)
    assert runs.environment()["cores"] == runs.rounding()["cores"] == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert runs.rounding()["cores"] == os.cpu_count()


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_git_state_is_the_commit_of_tracked_source_alone(tmp_path):
    source = tmp_path / "package" / "module.py"
    source.parent.mkdir()
    source.write_text("a = 1\n")
    assert runs._git_state(source) is None  # no repository
    git(tmp_path, "init", "-q")
    (tmp_path / "other.txt").write_text("")
    git(tmp_path, "add", "other.txt")
    git(tmp_path, "commit", "-qm", "one")
    assert runs._git_state(source) is None  # somebody else's repository
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "-qm", "two")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert runs._git_state(source) == {"commit": commit, "dirty": False}
    source.write_text("a = 2\n")
    assert runs._git_state(source) == {"commit": commit, "dirty": True}


def test_without_git_there_is_no_git_state(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert runs.environment()["git"] is None
