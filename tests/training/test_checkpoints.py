"""Promises of checkpoints: the same bits back, nothing half-written taken as good, nothing lost.

Damage is done to the files themselves.
"""

import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_trees import assert_same_bits, blank, sample, saved

from headlab.errors import HeadlabError, UsageError
from headlab.training.checkpoints import Checkpoints


def contents(directory):
    return {
        path.relative_to(directory): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_the_same_bits_structure_and_metadata_come_back(tmp_path):
    metadata = {"phase": "untied", "share": 0.1 + 0.2, "counts": [1, 2], "none": None, "é": True}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(7, sample(), metadata)
        tree, found, step = checkpoints.restore(blank(sample()))
    assert_same_bits(tree, sample())
    assert (found, step) == (metadata, 7)


def test_a_raw_optax_state_comes_back(tmp_path):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1)))
    state = optimizer.init({"w": jnp.ones((3, 2)), "b": jnp.ones(2, jnp.bfloat16)})
    state = jax.tree.map(lambda leaf: leaf + np.asarray(3, leaf.dtype), state)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        tree, _, _ = checkpoints.restore(blank(state))
    assert_same_bits(tree, state)


def test_numpy_leaves_and_targets_without_sharding_are_accepted(tmp_path):
    tree = {
        "a": np.arange(6.0, dtype=np.float32).reshape(2, 3).T,
        "b": np.array(4, np.int32),
    }
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, tree, {})
        target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
        found, _, _ = checkpoints.restore(target)
    np.testing.assert_array_equal(found["a"], tree["a"])
    np.testing.assert_array_equal(found["b"], tree["b"])


def test_a_moved_run_can_be_read(tmp_path):
    saved(tmp_path / "old", [3])
    (tmp_path / "old").rename(tmp_path / "new")
    with Checkpoints(tmp_path / "new", keep=1) as checkpoints:
        assert_same_bits(checkpoints.restore(blank(sample()))[0], sample(3))


def losses(tmp_path, keep, held_out):
    with Checkpoints(tmp_path, keep=keep) as checkpoints:
        for step, loss in enumerate(held_out, start=1):
            checkpoints.save(step, sample(step), {}, held_out=loss)
    return checkpoints


@pytest.mark.parametrize(
    ("keep", "held_out", "steps", "best"),
    [
        (2, [3.0, 1.0, 2.0, 4.0, 5.0], [2, 4, 5], 2),  # the last two and the best
        (2, [5.0, 4.0, 3.0, 2.0, 1.0], [4, 5], 5),  # the best is the last
        (1, [5.0, 1.0, 3.0], [2, 3], 2),
        (2, [None, None, None], [2, 3], None),
        (1, [None, 2.0, None, 3.0, None], [2, 5], 2),
        (1, [1.0, 1.0, 1.0], [1, 3], 1),  # the earliest of equals
        (1, [-1.0, 0.0, 0.0], [1, 3], 1),
    ],
)
def test_the_last_few_and_the_best_are_kept(tmp_path, keep, held_out, steps, best):
    closed = losses(tmp_path, keep, held_out)
    assert closed.all_steps() == steps
    assert closed.best_step() == best
    assert closed.latest_step() == len(held_out)
    with Checkpoints(tmp_path, keep=keep) as again:  # and another process knows the same
        assert (again.all_steps(), again.best_step()) == (steps, best)
        again.save(99, sample(), {}, held_out=100.0, wait=True)
        expected = {*([*steps, 99][-keep:]), *([best] if best else [])}
        assert set(again.all_steps()) == (expected if best else {*[*steps, 99][-keep:], 99})
        for step in steps:
            if step in expected:
                assert_same_bits(again.restore(blank(sample()), step)[0], sample(step))


def test_no_checkpoint_is_said_so(tmp_path):
    with Checkpoints(tmp_path / "new", keep=1) as checkpoints:
        assert checkpoints.all_steps() == []
        assert checkpoints.latest_step() is None and checkpoints.best_step() is None
        with pytest.raises(HeadlabError, match="no checkpoint that can be read"):
            checkpoints.restore(blank(sample()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": 1}, "already saved"),
        ({"held_out": math.nan}, "held_out=nan"),
        ({"held_out": math.inf}, "held_out=inf"),
        ({"metadata": {"a": (1, 2)}}, "exactly"),
        ({"metadata": {1: 2}}, "exactly"),
        ({"metadata": {"a": math.nan}}, "exactly"),
        ({"metadata": {"a": np.float32(1)}}, "exactly"),
        ({"tree": {"a": {"lr": 0.1}}}, "'a/lr' is a float"),
        ({"tree": {"a": jax.random.key(0)}}, "key_data"),
        ({"tree": {"a": jnp.zeros((0, 3))}}, "empty"),
        ({"tree": {"a/b": jnp.zeros(2)}}, "rename"),
    ],
)
def test_what_cannot_be_saved_is_refused(tmp_path, arguments, message):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, sample(1), {})
        with pytest.raises((UsageError, TypeError, ValueError), match=message):
            checkpoints.save(**({"step": 2, "tree": sample(), "metadata": {}} | arguments))
        assert checkpoints.all_steps() == [1]
        checkpoints.save(3, sample(3), {}, wait=True)  # and the next one is none the worse
        assert checkpoints.all_steps() == [1, 3]


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"checkpoint\.keep=0"):
        Checkpoints(tmp_path, keep=0)


def test_other_leaves_are_refused_naming_their_paths(tmp_path):
    target = blank(sample())
    target["params"]["output"] = target["params"].pop("weight")
    target["params"]["gain"] = jax.ShapeDtypeStruct((4,), jnp.bfloat16)
    target["key"] = jax.ShapeDtypeStruct((2,), jnp.int32)
    with Checkpoints(saved(tmp_path, [1, 2]), keep=2) as checkpoints:
        with pytest.raises(UsageError) as refusal:
            checkpoints.restore(target)
        message = str(refusal.value)
        assert "not in the checkpoint: params/output" in message
        assert "in the checkpoint alone: params/weight" in message
        assert "params/gain (bfloat16[3] saved, bfloat16[4] wanted)" in message
        assert "key (uint32[2] saved, int32[2] wanted)" in message
        assert checkpoints.bad == [] and checkpoints.all_steps() == [1, 2]


def test_the_target_may_depend_on_the_step_and_so_on_its_phase(tmp_path):
    tied, untied = {"table": jnp.ones(3)}, {"table": jnp.ones(3), "output": jnp.zeros(3)}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, tied, {})
        checkpoints.save(2, untied, {}, wait=True)

        def restored():
            return checkpoints.restore(lambda step: untied if step > 1 else tied)

        assert_same_bits(restored()[0], untied)
        shutil.rmtree(tmp_path / "2" / "state")
        assert_same_bits(restored()[0], tied)


def test_a_step_that_is_not_there_is_refused_naming_those_that_are(tmp_path):
    with (
        Checkpoints(saved(tmp_path, [1, 2]), keep=2) as checkpoints,
        pytest.raises(UsageError, match=r"no step 5; it has \[1, 2\]"),
    ):
        checkpoints.restore(blank(sample()), 5)


def test_saving_copies_before_it_returns(tmp_path):
    """Fault: buffers donated to the next step, or overwritten, while they are being written."""

    @jax.jit
    def init():
        return {"w": jnp.zeros((512, 512)), "n": jnp.int32(0)}

    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    state = init()
    host = np.zeros((512, 512), np.float32)
    with Checkpoints(tmp_path, keep=20) as checkpoints:
        for number in range(20):
            checkpoints.save(number, {"state": state, "host": host}, {})
            for _ in range(3):
                state = step(state)
            host += 3
        target = {"state": state, "host": state["w"]}
        for number in range(20):
            tree, _, _ = checkpoints.restore(target, number)
            for leaf in jax.tree.leaves(tree):
                np.testing.assert_array_equal(leaf, 3 * number)


def test_restored_arrays_may_be_donated(tmp_path):
    """Fault: restored arrays that share host memory with each other or with the reader."""
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, {"w": jnp.arange(4096.0)}, {}, wait=True)
        first, _, _ = checkpoints.restore(blank({"w": jnp.zeros(4096)}))
        second, _, _ = checkpoints.restore(blank({"w": jnp.zeros(4096)}))
        for _ in range(5):
            first = step(first)
        np.testing.assert_array_equal(second["w"], np.arange(4096.0))
        np.testing.assert_array_equal(first["w"], np.arange(4096.0) + 5)


def data_file(step_directory):
    """The file that holds most of the arrays."""
    return max(step_directory.rglob("d/*"), key=lambda path: path.stat().st_size)


def truncate(step_directory):
    path = data_file(step_directory)
    path.write_bytes(path.read_bytes()[:-9])


def empty(step_directory):
    data_file(step_directory).write_bytes(b"")


def remove(name):
    def damage(step_directory):
        path = step_directory / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def garble(name):
    def damage(step_directory):
        (step_directory / name).write_bytes(b"\x00garbage\xff" * 7)

    return damage


DAMAGES = {
    "truncated data": truncate,
    "empty data": empty,
    "missing data": lambda directory: data_file(directory).unlink(),
    "garbage data": lambda directory: data_file(directory).write_bytes(b"\xde\xad" * 999),
    "missing arrays": remove("state"),
    "missing manifest": remove("state/manifest.ocdbt"),
    "garbage manifest": garble("state/manifest.ocdbt"),
    "garbage tree": garble("state/_METADATA"),
    "missing record": remove("record"),
    "garbage record": garble("record/metadata"),
    "nothing": lambda directory: [remove(path.name)(directory) for path in directory.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_checkpoint_is_named_set_aside_and_the_one_before_used(tmp_path, damage):
    saved(tmp_path, [1, 2, 3])
    damage(tmp_path / "3")
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        tree, metadata, step = checkpoints.restore(blank(sample()))
        assert (metadata, step) == ({"step": 2}, 2)
        assert_same_bits(tree, sample(2))
        ((bad_step, reason),) = checkpoints.bad
        assert bad_step == 3 and str(tmp_path / "3") in reason
        assert (tmp_path / "bad-3").is_dir() and checkpoints.all_steps() == [1, 2]
        checkpoints.save(3, sample(30), {"step": 3}, wait=True)
        assert_same_bits(checkpoints.restore(blank(sample()))[0], sample(30))
        damage(tmp_path / "3")  # the same step again
        assert checkpoints.restore(blank(sample()))[2] == 2
        assert {path.name for path in tmp_path.iterdir()} == {"1", "2", "bad-3", "bad-3-again"}


def test_when_all_are_damaged_each_is_named_and_none_is_moved(tmp_path):
    saved(tmp_path, [1, 2, 3])
    for step, kind in (("1", "truncated data"), ("2", "garbage record"), ("3", "missing arrays")):
        DAMAGES[kind](tmp_path / step)
    before = contents(tmp_path)
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        with pytest.raises(HeadlabError) as failure:
            checkpoints.restore(blank(sample()))
        for step in "123":
            assert str(tmp_path / step) in str(failure.value)
        with pytest.raises(HeadlabError, match="Ask for another step"):
            checkpoints.restore(blank(sample()), 2)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["commit_success.txt", "_CHECKPOINT_METADATA", "state/_METADATA"])
def test_a_missing_file_that_no_value_depends_on_costs_no_training(tmp_path, name):
    """The content is verified, so a mark or a description that is lost makes nothing doubtful."""
    remove(name)(saved(tmp_path, [1, 2]) / "2")
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert_same_bits(checkpoints.restore(blank(sample()))[0], sample(2))
        assert checkpoints.bad == []
