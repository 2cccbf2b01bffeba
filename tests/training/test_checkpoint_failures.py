"""Promises of checkpoints when the process is killed or the disk full: both done in earnest."""

import json
import signal
import subprocess
import sys
import textwrap
import time

import jax.numpy as jnp
import numpy as np

from headlab import checkpoint_files as files
from headlab.training.checkpoints import Checkpoints

KILLED = """
    import sys
    import numpy as np
    from headlab.training.checkpoints import Checkpoints

    checkpoints = Checkpoints(sys.argv[1], keep=2)
    first = (checkpoints.latest_step() or 0) + 1
    for step in range(first, first + 1000):
        tree = {"w": np.full((256, 1024), step, np.float32), "n": np.full((), step, np.int32)}
        checkpoints.save(step, tree, {"step": step}, held_out=float(step))
        print(step, flush=True)
"""


def test_a_kill_at_any_moment_leaves_the_last_committed_step_usable(tmp_path):
    """SIGKILL at moments spread over saves, commits and removals of old checkpoints."""
    target = {"w": jnp.zeros((256, 1024)), "n": jnp.int32(0)}
    for attempt in range(3):
        command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            started = [int(process.stdout.readline()) for _ in range(4)]
            time.sleep(0.02 * attempt)  # another moment of the save each time
            process.send_signal(signal.SIGKILL)
            started += [int(line) for line in process.stdout.read().split()]
        with Checkpoints(tmp_path, keep=2) as checkpoints:
            tree, metadata, step = checkpoints.restore(target)
            assert checkpoints.bad == []
            assert started[-1] - 1 <= step <= started[-1] + 1  # save waits for the one before
            assert metadata == {"step": step} and int(tree["n"]) == step
            np.testing.assert_array_equal(tree["w"], step)
            assert checkpoints.best_step() == 1
            names = {path.name for path in tmp_path.iterdir()}
            assert names == {str(step) for step in checkpoints.all_steps()}


FULL_DISK = """
    import json, resource, signal, sys
    import numpy as np
    from headlab.errors import HeadlabError
    from headlab.training.checkpoints import Checkpoints

    def tree(step):
        return {"w": np.full((256, 1024), step, np.float32)}

    def refuse(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    checkpoints = Checkpoints(sys.argv[1], keep=1)
    for step in (1, 2):
        checkpoints.save(step, tree(step), {}, held_out=float(step))
    checkpoints.wait()
    refuse(100_000)
    found = {}
    try:
        checkpoints.save(3, tree(3), {})
        checkpoints.wait()
    except HeadlabError as problem:
        found["wait"] = str(problem)
    try:
        checkpoints.save(4, tree(4), {})
        checkpoints.save(5, tree(5), {})
    except HeadlabError as problem:
        found["next save"] = str(problem)
    found["steps"] = checkpoints.all_steps()
    refuse(resource.RLIM_INFINITY)
    checkpoints.save(6, tree(6), {}, wait=True)
    found["recovered"] = checkpoints.all_steps()
    refuse(100_000)
    try:
        checkpoints.save(7, tree(7), {})
        checkpoints.close()
    except HeadlabError as problem:
        found["close"] = str(problem)
    checkpoints = Checkpoints(sys.argv[1], keep=1)
    try:
        with checkpoints:
            checkpoints.save(8, tree(8), {})
            raise KeyError("first")
    except KeyError as problem:
        found["note"] = problem.__notes__
    print(json.dumps(found))
"""


def test_a_full_disk_is_an_error_that_names_the_step_and_leaves_earlier_checkpoints(tmp_path):
    """The operating system refuses to write more than 100 kB of a file of 1 MB."""
    command = [sys.executable, "-c", textwrap.dedent(FULL_DISK), str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert finished.stderr == ""  # no traceback of a thread, no log
    found = json.loads(finished.stdout)
    assert "step 3 could not be written" in found["wait"]
    assert "step 2 is the last good one" in found["wait"]
    assert "step 4 could not be written" in found["next save"]
    assert found["steps"] == [1, 2]
    assert found["recovered"] == [1, 6]
    assert "step 7 could not be written" in found["close"]
    assert "step 6 is the last good one" in found["close"]
    assert "step 8 could not be written" in found["note"][0]
    assert {path.name for path in tmp_path.iterdir()} == {"1", "6"}  # nothing half-written
    target = {"w": jnp.zeros((256, 1024))}
    np.testing.assert_array_equal(files.read_checkpoint(tmp_path / "6", target)[0]["w"], 6)
    np.testing.assert_array_equal(files.read_checkpoint(tmp_path / "1", target)[0]["w"], 1)
