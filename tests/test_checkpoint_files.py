"""Promises of the files of a checkpoint: all that is read was verified, wherever it is placed."""

import shutil
import subprocess
import sys
import textwrap

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoint_trees import assert_same_bits, blank, sample, saved

from headlab import checkpoint_files as files
from headlab.errors import UsageError


def run_python(program, *arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        **options,
    )


def test_orbax_itself_can_read_the_arrays(tmp_path):
    saved(tmp_path, [3])
    tree = files.orbax().PyTreeCheckpointer().restore(tmp_path / "3" / "state")
    np.testing.assert_array_equal(tree["params"]["weight"], sample(3)["params"]["weight"])


def test_a_part_is_read_alone(tmp_path):
    path = saved(tmp_path, [3]) / "3"
    params = sample(3)["params"]
    tree, metadata = files.read_checkpoint(path, blank(params), under="params")
    assert_same_bits(tree, params)
    assert metadata == {"step": 3}
    with pytest.raises(UsageError, match="in the checkpoint alone: params/gain"):
        files.read_checkpoint(path, {"weight": params["weight"]}, under="params")


SHARDED = """
    import os, sys
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    import jax, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    from headlab.training.checkpoints import Checkpoints

    values = np.arange(32, dtype=np.float32).reshape(8, 4)

    def shardings(n_data, n_vocab):
        devices = np.array(jax.devices()[: n_data * n_vocab]).reshape(n_data, n_vocab)
        mesh = jax.sharding.Mesh(devices, ("data", "vocab"))
        specs = {"rows": P("vocab", None), "both": P("data", "vocab"), "whole": P(), "count": P()}
        return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}

    arrays = {"rows": values, "both": values + 1, "whole": values + 2, "count": np.int32(9)}
    increment = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
    with Checkpoints(sys.argv[1], keep=10) as checkpoints:
        meshes = [(1, 4), (2, 2), (4, 1), (1, 1), (2, 1)]
        for step, mesh in enumerate(meshes):
            checkpoints.save(step, jax.device_put(arrays, shardings(*mesh)), {})
        for step in range(len(meshes)):
            for mesh in meshes:
                wanted = shardings(*mesh)
                target = {
                    name: jax.ShapeDtypeStruct(np.shape(a), a.dtype, sharding=wanted[name])
                    for name, a in arrays.items()
                }
                tree, _, _ = checkpoints.restore(target, step)
                for name, array in tree.items():
                    assert array.sharding == wanted[name], (name, array.sharding)
                    assert np.asarray(array).tobytes() == np.asarray(arrays[name]).tobytes()
                for _ in range(2):
                    tree = increment(tree)
                for name, array in tree.items():
                    for shard in array.addressable_shards:
                        np.testing.assert_array_equal(shard.data, arrays[name][shard.index] + 2)
    print("same")
"""


def test_any_mesh_restores_what_any_other_saved_with_its_own_shardings(tmp_path):
    assert run_python(SHARDED, tmp_path).stdout == "same\n"


def test_no_flipped_byte_changes_what_is_restored(tmp_path):
    """Bytes spread over every file, changed one at a time: either the damage is found, or what is
    restored does not depend on that byte.
    """
    path = saved(tmp_path, [3]) / "3"
    found = unaffected = 0
    for file in sorted(path.rglob("*")):
        if not file.is_file():
            continue
        original = file.read_bytes()
        stride = max(1, len(original) // (40 if file.parent.name == "record" else 10))
        for position in range(0, len(original), stride):
            flipped = bytearray(original)
            flipped[position] ^= 0x11
            file.write_bytes(flipped)
            try:
                tree, metadata = files.read_checkpoint(path, blank(sample()))
            except files.CorruptCheckpoint:
                found += 1
            else:
                unaffected += 1
                assert_same_bits(tree, sample(3))
                assert metadata == {"step": 3}
        file.write_bytes(original)
    assert found > 40 and unaffected > 0
    assert_same_bits(files.read_checkpoint(path, blank(sample()))[0], sample(3))


def test_a_flipped_bit_in_any_array_is_found_though_the_storage_does_not(tmp_path):
    """The arrays are replaced by other, well-formed ones: only the digests can tell."""
    saved(tmp_path, [3])
    other = {"params": {"weight": sample(3)["params"]["weight"].at[4, 2].add(1e-6)}}
    tree = jax.tree.map(np.asarray, files.nested(files.named_leaves(sample(3))))
    tree["params"] |= jax.tree.map(np.asarray, other["params"])
    shutil.rmtree(tmp_path / "3" / "state")
    files.orbax().PyTreeCheckpointer().save(tmp_path / "3" / "state", tree)
    with pytest.raises(files.CorruptCheckpoint, match="'params/weight' are not those"):
        files.read_checkpoint(tmp_path / "3", blank(sample()))


def test_nothing_is_logged(tmp_path):
    program = """
        import logging, sys, warnings
        warnings.simplefilter("always")
        logging.basicConfig(level=logging.DEBUG)
        logging.getLogger("jax").setLevel(logging.ERROR)
        logging.getLogger("asyncio").setLevel(logging.ERROR)
        import jax.numpy as jnp
        from headlab.training.checkpoints import Checkpoints
        with Checkpoints(sys.argv[1], keep=1) as checkpoints:
            checkpoints.save(1, {"a": jnp.zeros(3)}, {})
            checkpoints.save(2, {"a": jnp.zeros(3)}, {})
            checkpoints.restore({"a": jnp.zeros(3)})
    """
    finished = run_python(program, tmp_path)
    assert (finished.stdout, finished.stderr) == ("", "")


def test_a_log_of_another_library_still_appears(caplog):
    from absl import logging

    files.orbax()
    logging.warning("of something else")
    assert "of something else" in caplog.text


def test_digests_cover_values_and_not_layout():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert files.array_digest(array) == files.array_digest(np.asfortranarray(array))
    assert files.array_digest(array) == files.array_digest(np.ascontiguousarray(array))
    changed = array.copy()
    changed[2, 3] = np.nextafter(changed[2, 3], 0, dtype=np.float32)
    assert files.array_digest(changed) != files.array_digest(array)
    assert files.array_digest(np.array(1, ml_dtypes.bfloat16)) != files.array_digest(
        np.array(-1, ml_dtypes.bfloat16)
    )
