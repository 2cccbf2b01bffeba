"""Small trees to save, and what to compare them by."""

import jax
import jax.numpy as jnp
import numpy as np

from headlab.training.checkpoints import Checkpoints


def sample(seed=0):
    """A small tree with every kind of leaf: 0-d, matrix, four dtypes, empty dictionary, list."""
    rng = np.random.default_rng(seed)
    return {
        "params": {
            "weight": jnp.asarray(rng.standard_normal((5, 3)), jnp.float32),
            "gain": jnp.asarray(rng.standard_normal(3), jnp.bfloat16),
            "frozen": {},
        },
        "optimizer": [
            jnp.int32(seed),
            {"mu": jnp.asarray(rng.standard_normal(7), jnp.float32)},
            {},
        ],
        "key": jnp.asarray(rng.integers(0, 2**32, 2, dtype=np.uint32)),
        "special": jnp.array([jnp.nan, jnp.inf, -0.0, 1e-45], jnp.float32),
    }


def blank(tree):
    """The abstract target of a tree, on the first device."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def saved(directory, steps, **options):
    """A directory with the checkpoints `sample(step)` of these steps, closed."""
    with Checkpoints(directory, keep=len(steps), **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, sample(step), {"step": step})
    return directory
