"""headlab against PyTorch itself: whole training over more variants, and the two ops that are written by hand."""

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from peers import comparison, recipe

from headlab.ops import LinearSpec, LogitMap, causal_attention, linear_loss

pytestmark = pytest.mark.peers

VARIANTS = {
    "tied, no options": {},
    "untied, no options": {"head.name": "untied", "optimizer.schedule": "constant"},
    "untied, all of the loss": {
        "head.name": "untied",
        "head.bias": "true",
        "head.softcap": "1.5",
        "head.logit_scale": "-1.3",
        "train.z_loss_weight": "0.1",
        "train.label_smoothing": "0.3",
        "optimizer.clip_norm": "none",
    },
    "biases, learned positions, one key-value head": {
        "model.bias": "true",
        "model.n_kv_heads": "1",
        "optimizer.warmup_steps": "0",
        "groups.body.rate_multiplier": "3.0",
        "groups.body.weight_decay": "1.0",
    },
    "LayerNorm without bias, rotary, four micro-batches": {
        "model.norm": "layer",
        "model.position": "rotary",
        "model.rope_theta": "100.0",
        "train.micro_batches": "4",
        "model.remat": "true",
    },
    "tied, SwiGLU, scaled": {
        "model.activation": "swiglu",
        "head.logit_scale": "0.25",
        "train.z_loss_weight": "0.001",
    },
}


@pytest.fixture(scope="module")
def torch():
    import torch

    return torch


@pytest.mark.parametrize("name", VARIANTS)
def test_three_steps_equal_those_of_pytorch(name):
    from peers import torch_reference

    # one block compiles in half the time; the goldens have two
    config = recipe.config_of({"model.n_layers": "1", **VARIANTS[name]})
    phase, state = recipe.start(config)
    theirs = torch_reference.train(config, recipe.flatten(state.params))
    ours = recipe.train_headlab(config, phase, state)
    relative = comparison.relative_error(config)
    assert ours.loss == pytest.approx(theirs.loss, rel=relative)
    assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=relative)
    bounds = comparison.gradient_bounds(config, norms(theirs.gradients), theirs.gradient_norm[0])
    check(ours.gradients, theirs.gradients, bounds)
    bounds = comparison.parameter_bounds(config, bounds, norms(theirs.parameters))
    check(ours.parameters, theirs.parameters, bounds)


def norms(arrays):
    return {path: float(np.linalg.norm(x)) for path, x in arrays.items()}


def check(ours, theirs, bounds):
    assert sorted(ours) == sorted(theirs)
    errors = norms({path: ours[path] - theirs[path] for path in theirs})
    assert {path: e for path, e in errors.items() if not e <= bounds[path]} == {}


@pytest.mark.parametrize("name", recipe.GOLDEN)
def test_the_committed_goldens_are_what_pytorch_gives(name):
    from peers import make_goldens

    committed = json.loads(Path(make_goldens.PATH).read_text())["cases"][name]
    # printed to 12 digits; entries of gradients are differences of numbers of size 1
    for kind, fresh in make_goldens.goldens(name).items():
        assert flat(fresh) == pytest.approx(flat(committed[kind]), rel=1e-10, abs=1e-10)


def flat(numbers):
    return np.concatenate(
        [np.ravel(x) for x in numbers.values()] if isinstance(numbers, dict) else [numbers]
    )


TOKENS, ROWS, V, D = 37, 224, 211, 24
LOSSES = {
    "plain": {},
    "bias": {"bias": True},
    "soft cap, scale": {"softcap": 3.0, "scale": 0.5, "bias": True},
    "z-loss, smoothing": {"z": 0.01, "alpha": 0.2},
    "all": {"softcap": 5.0, "scale": 2.0, "bias": True, "z": 0.1, "alpha": 0.1},
    "large logits": {"scale": 1000.0},
}


@pytest.mark.parametrize("blocks", [(None, None), (8, 50)])
@pytest.mark.parametrize("name", LOSSES)
def test_linear_loss_is_cross_entropy_of_pytorch_in_value_and_gradient(torch, name, blocks):
    o = {"scale": 1.0, "softcap": None, "bias": False, "z": 0.0, "alpha": 0.0} | LOSSES[name]
    shapes = {"h": (TOKENS, D), "weight": (ROWS, D)} | ({"bias": (ROWS,)} if o["bias"] else {})
    arrays = {
        key: (recipe.noise(key, math.prod(shape)) * 2).astype(np.float32).reshape(shape)
        for key, shape in shapes.items()
    }
    targets = np.floor((recipe.noise("targets", TOKENS) + 0.5) * V).astype(np.int32)
    where = recipe.noise("counted", TOKENS) > -0.2
    spec = LinearSpec(V, LogitMap(o["scale"], o["softcap"]), "float32", *blocks)

    def ours(arrays):
        return linear_loss(
            arrays["h"],
            arrays["weight"],
            arrays.get("bias"),
            targets,
            where,
            spec,
            z_loss_weight=o["z"],
            label_smoothing=o["alpha"],
        ).objective

    value, gradients = jax.jit(jax.value_and_grad(ours))(arrays)

    def theirs(dtype):
        p = {key: torch.tensor(x, dtype=dtype, requires_grad=True) for key, x in arrays.items()}
        bias = p["bias"][:V] if o["bias"] else None
        logits = o["scale"] * torch.nn.functional.linear(p["h"], p["weight"][:V], bias)
        if o["softcap"] is not None:
            logits = o["softcap"] * torch.tanh(logits / o["softcap"])
        ids = torch.where(torch.tensor(where), torch.tensor(targets), -100).long()
        loss = torch.nn.functional.cross_entropy(
            logits, ids, ignore_index=-100, reduction="sum", label_smoothing=o["alpha"]
        )
        lse = logits.logsumexp(-1)[torch.tensor(where)]
        loss = loss + o["z"] * lse.square().sum()
        loss.backward()
        return loss.item(), {key: x.grad.numpy() for key, x in p.items()}, logits.abs().max().item()

    # A logit is a sum of D products, a gradient one of V or TOKENS terms that e^logit multiplies: an error of a logit
    # is one of its size times its gradient, the rest grows as √n (comparison.relative_error).
    _, _, largest = theirs(torch.float64)
    relative = 4 * comparison.UNIT * (math.sqrt(D) * max(largest, 1) + math.sqrt(V + TOKENS))
    for dtype in (torch.float32, torch.float64):
        # in float32 both have errors
        bound = relative * (2 if dtype == torch.float32 else 1)
        loss, expected, _ = theirs(dtype)
        assert float(value) == pytest.approx(loss, rel=bound)
        for key, gradient in gradients.items():
            assert np.linalg.norm(gradient - expected[key]) <= bound * np.linalg.norm(expected[key])


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_causal_attention_is_that_of_pytorch_in_value_and_gradient(torch, n_kv_heads):
    length, width = 19, 8
    shapes = {name: (2, length, n_kv_heads, width) for name in ("key", "value")}
    shapes |= {"query": (2, length, 4, width), "cotangent": (2, length, 4, width)}
    arrays = {
        key: (recipe.noise(key, math.prod(shape)) * 4).astype(np.float32).reshape(shape)
        for key, shape in shapes.items()
    }
    cotangent = arrays.pop("cotangent")
    names = ("query", "key", "value")
    ours, pull = jax.vjp(causal_attention, *(arrays[name] for name in names))
    p = [torch.tensor(arrays[name]).double().requires_grad_() for name in names]
    attend = torch.nn.functional.scaled_dot_product_attention
    theirs = attend(*(x.transpose(1, 2) for x in p), is_causal=True, enable_gqa=True)
    theirs = theirs.transpose(1, 2)
    theirs.backward(torch.tensor(cotangent).double())
    scores = np.sqrt(width) * 4  # entries of size 2 or less: q·k/√width ≤ 4·√width
    relative = 4 * comparison.UNIT * (math.sqrt(width) * scores + math.sqrt(3 * length))
    pairs = zip((ours, *pull(cotangent)), (theirs.detach(), *(x.grad for x in p)), strict=True)
    for mine, expected in pairs:
        assert np.linalg.norm(mine - expected.numpy()) <= relative * np.linalg.norm(expected)
