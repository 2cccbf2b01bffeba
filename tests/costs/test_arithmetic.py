"""Costs by arithmetic agree with what XLA counts for dense programs, and with counting by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headlab.costs import body_flops_per_token, linear_head_cost, peak_flops

TOKENS, VOCAB, WIDTH = 64, 2048, 1024


def _xla_flops(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    analysis = jax.jit(function).lower(*arguments).compile().cost_analysis()
    return (analysis[0] if isinstance(analysis, list) else analysis)["flops"]


def _dense_nll(h, weight):
    return -jnp.sum(jax.nn.log_softmax(h @ weight.T)[:, 0])


@pytest.mark.optimised
@pytest.mark.parametrize(
    ("mode", "program"),
    [
        ("scoring", _dense_nll),
        ("decoding", _dense_nll),
        ("training", jax.grad(_dense_nll, argnums=(0, 1))),
    ],
)
def test_head_flops_are_those_of_a_dense_program(mode, program):
    """Within 2%: the softmax's some ten operations a logit stand against 2·1024 of the multiply."""
    cost = linear_head_cost(mode, vocab_size=VOCAB, d_model=WIDTH, own_parameters=0)
    counted = _xla_flops(program, (TOKENS, WIDTH), (VOCAB, WIDTH)) / TOKENS
    assert abs(cost.flops_per_token / counted - 1) < 0.02


def test_head_cost_reports_parameters_and_bytes():
    cost = linear_head_cost("decoding", vocab_size=10, d_model=4, own_parameters=7, itemsize=2)
    assert (cost.parameters, cost.bytes_read) == (7, 80.0)


def test_an_unknown_mode_is_refused_by_name():
    with pytest.raises(ValueError, match="'serving'.*'training', 'scoring' or 'decoding'"):
        linear_head_cost("serving", vocab_size=10, d_model=4, own_parameters=0)


@pytest.mark.optimised
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("n_kv_heads", [2, 8])
def test_body_flops_are_those_of_its_multiplies(gated, n_kv_heads):
    """Matrices as XLA counts them; attention by counting the pairs of positions one by one."""
    d, heads, d_mlp, length = 128, 8, 256, 17
    narrow = d // heads * n_kv_heads

    def projections(x, q, k, v, o, *mlp):
        return [x @ w for w in (q, k, v, o, *mlp)]

    shapes = [(TOKENS, d), (d, d), (d, narrow), (d, narrow), (d, d)]
    shapes += [(d, d_mlp)] * (3 if gated else 2)  # the way down costs what a way up costs
    matrices = _xla_flops(projections, *shapes) / TOKENS
    pairs = sum(1 for t in range(length) for s in range(length) if s <= t)
    attention = pairs * (2 * d + 2 * d) / length  # q·k and weight·v
    found = body_flops_per_token(
        d_model=d,
        n_layers=3,
        n_heads=heads,
        n_kv_heads=n_kv_heads,
        d_head=d // heads,
        d_mlp=d_mlp,
        gated=gated,
        length=length,
    )
    np.testing.assert_allclose(found, 3 * (matrices + attention), rtol=1e-12)


def test_the_peak_of_an_unknown_device_is_unknown():
    assert peak_flops("cpu") is None
    assert peak_flops("NVIDIA H200") == 989e12
