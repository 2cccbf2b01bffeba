"""headlab's adaptive softmax against PyTorch's with the same parameters: recorded numbers, and PyTorch itself."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from peers import adaptive_reference as reference

from headlab.embeddings import Constant

GOLDENS = np.load(Path(__file__).with_name("adaptive_goldens.npz"))


def golden(name, kind):
    prefix = f"{name}/{kind}/"
    return {k.removeprefix(prefix): GOLDENS[k] for k in GOLDENS.files if k.startswith(prefix)}


def check(name, given, wanted):
    head, targets = reference.head_of(name, given), jnp.asarray(given["targets"])
    log_probs = head.log_probs(given["h"], dtype=np.float64)
    # Some hundred roundings of numbers below 100, on both sides.
    np.testing.assert_allclose(log_probs, wanted["log_probs"], rtol=0, atol=100 * 100 * 2.0**-53)
    target = np.take_along_axis(log_probs, given["targets"][:, None], axis=1)[:, 0]
    np.testing.assert_allclose(-target, wanted["nll"], rtol=0, atol=2 * 100 * 100 * 2.0**-53)

    graph, params, constants = nnx.split(head, nnx.Param, Constant)
    h = jnp.asarray(given["h"])
    for sum_of in (
        lambda head, h: head.loss(h, targets).objective,
        lambda head, h: jnp.sum(head.nll(h, targets)),
    ):

        @jax.jit
        def step(params, h, sum_of=sum_of):
            def value(params, h):
                return sum_of(nnx.merge(graph, params, constants), h)

            return jax.value_and_grad(value, argnums=(0, 1))(params, h)

        total, (dparams, dh) = step(params, h)
        # In float32 two products, a normaliser of up to 53 terms and a sum over 56 tokens stand in a row: roundings add
        # up like a random walk, of which four deviations do not happen.
        close = 4 * np.sqrt(12 + 12 + 53 + 56) * 2.0**-24
        assert total == pytest.approx(wanted["nll"].sum(), rel=close)
        found = {"h": dh, **reference.flatten(dparams)}
        assert {f"gradients/{path}" for path in found} == {k for k in wanted if "gradients/" in k}
        for path, gradient in found.items():
            exact = wanted[f"gradients/{path}"]
            difference = np.linalg.norm(np.asarray(gradient, np.float64) - exact)
            # That of a tail's rows may cancel: as large as a sixteenth of its terms, whose norm is √tokens at most.
            assert difference <= close * (np.linalg.norm(exact) + np.sqrt(reference.TOKENS) / 16)


@pytest.mark.parametrize("name", reference.VARIANTS)
def test_log_probs_loss_and_gradients_are_those_recorded_of_pytorch(name):
    check(name, golden(name, "given"), golden(name, "torch"))


@pytest.mark.peers
@pytest.mark.parametrize("name", reference.VARIANTS)
def test_log_probs_loss_and_gradients_are_those_of_pytorch(name):
    given = golden(name, "given")
    found = reference.torch_results(name, given)
    check(name, given, found)
    for key, value in golden(name, "torch").items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=100 * 100 * 2.0**-53)
