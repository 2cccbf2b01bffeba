"""The fused loss beside tokamax's, on the same arrays."""

import jax
import numpy as np
import pytest

from headlab.ops import linear_cross_entropy

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_value_and_gradients_equal_those_of_tokamax(reduction):
    """Float32 sums of 64 products of numbers below 5: both are within some hundred roundings of the true value."""
    import tokamax
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # else tokamax reads pytest's arguments as its own
    rng = np.random.default_rng(0)
    h, weight = (rng.normal(size=s).astype(np.float32) for s in ((96, 64), (256, 64)))
    targets = rng.integers(0, 256, 96).astype(np.int32)

    def ours(h, weight):
        return linear_cross_entropy(h, weight, targets, reduction=reduction, vocab_block=100)

    def theirs(h, weight):
        return tokamax.linear_softmax_cross_entropy_loss(
            h, targets, weight.T, reduction=reduction, implementation="xla"
        )

    found, wanted = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(h, weight) for f in (ours, theirs)
    )
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    for a, b in zip(found[1], wanted[1], strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)
