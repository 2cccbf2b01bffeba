"""Rates, groups and weight decay: which parameters, how much, at which step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from ml_collections import ConfigDict

from headlab import config as configs
from headlab import models
from headlab.training.optimizer import group_of, is_decayed, make_optimizer, paths, schedule

# If this list changes on purpose, say in the commit which parameters began or ceased to decay.
DECAYED = {
    "embedding/weight",
    "positions",
    "blocks/0/attention/query/kernel",
    "blocks/0/attention/key/kernel",
    "blocks/0/attention/value/kernel",
    "blocks/0/attention/output/kernel",
    "blocks/0/mlp/up/kernel",
    "blocks/0/mlp/gate/kernel",
    "blocks/0/mlp/down/kernel",
    "head/weight",
}
NOT_DECAYED = {
    "blocks/0/attention/query/bias",
    "blocks/0/attention/key/bias",
    "blocks/0/attention/value/bias",
    "blocks/0/attention/output/bias",
    "blocks/0/attention_norm/gain",
    "blocks/0/attention_norm/bias",
    "blocks/0/mlp/up/bias",
    "blocks/0/mlp/gate/bias",
    "blocks/0/mlp/down/bias",
    "blocks/0/mlp_norm/gain",
    "blocks/0/mlp_norm/bias",
    "final_norm/gain",
    "final_norm/bias",
    "head/bias",
}


@pytest.fixture(scope="module")
def config():
    overrides = {
        "head.name": "untied",
        "head.bias": "true",
        "model.n_layers": "1",
        "model.bias": "true",
        "model.norm": "layer",
        "model.activation": "swiglu",
    }
    return configs.load("configs/tiny.py", list(overrides.items()))


@pytest.fixture(scope="module")
def params(config):
    return nnx.to_pure_dict(nnx.state(models.build(config, config.data.vocab_size)))


def test_weight_decay_meets_exactly_the_matrices(params):
    names = set(jax.tree.leaves(paths(params)))
    assert {name for name in names if is_decayed(name)} == DECAYED
    assert names - DECAYED == NOT_DECAYED


def test_a_parameter_of_an_unknown_kind_is_refused_by_name():
    with pytest.raises(ValueError, match="head/experts"):
        is_decayed("head/experts")


def test_groups_are_embedding_head_and_body(params):
    groups = {name: group_of(name) for name in jax.tree.leaves(paths(params))}
    assert {n for n, g in groups.items() if g == "embedding"} == {"embedding/weight", "positions"}
    assert {n for n, g in groups.items() if g == "head"} == {"head/weight", "head/bias"}


def options(**changes):
    base = {"peak_rate": 2.0, "final_fraction": 0.1, "warmup_steps": 4, "schedule": "cosine"}
    return ConfigDict({**base, **changes})


@pytest.mark.parametrize("name", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_the_rate_follows_its_formula(name, warmup):
    rate = schedule(options(schedule=name, warmup_steps=warmup), 20)
    for s in range(20):
        p = (s - warmup) / (20 - warmup)
        expected = {
            "constant": 2.0,
            "linear": 2.0 * (1 - 0.9 * p),
            "cosine": 2.0 * (0.1 + 0.9 * (1 + np.cos(np.pi * p)) / 2),
        }[name]
        if s < warmup:
            expected = 2.0 * (s + 1) / warmup
        assert float(rate(s)) == pytest.approx(expected, rel=1e-6), s


def test_updates_are_adamw_with_clipping_and_the_group_settings(config, params):
    """Three steps against AdamW written out in float64."""
    changed = ConfigDict(config.to_dict())
    changed.optimizer.warmup_steps = 2
    changed.optimizer.clip_norm = 0.5
    for group, (rate, decay) in {
        "embedding": (0.5, 0.3),
        "head": (2.0, 0.0),
        "body": (1.0, 0.1),
    }.items():
        changed.groups[group].rate_multiplier, changed.groups[group].weight_decay = rate, decay
    optimizer = make_optimizer(changed, params)
    o = changed.optimizer
    rate = schedule(o, changed.train.steps)
    names = jax.tree.leaves(paths(params))
    state, now = optimizer.init(params), params
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(params)]
    m, v = [np.zeros_like(x) for x in leaves], [np.zeros_like(x) for x in leaves]
    rng = np.random.default_rng(0)
    for s in range(3):
        grads = [rng.normal(size=x.shape) for x in leaves]
        tree = jax.tree.unflatten(
            jax.tree.structure(params), [jnp.asarray(g, jnp.float32) for g in grads]
        )
        norm = np.sqrt(sum((g**2).sum() for g in grads))
        updates, state = optimizer.update(tree, state, now, norm=jnp.float32(norm))
        now = optax.apply_updates(now, updates)
        for i, name in enumerate(names):
            g = grads[i] * min(1, 0.5 / norm)
            m[i] = o.b1 * m[i] + (1 - o.b1) * g
            v[i] = o.b2 * v[i] + (1 - o.b2) * g**2
            direction = (m[i] / (1 - o.b1 ** (s + 1))) / (
                np.sqrt(v[i] / (1 - o.b2 ** (s + 1))) + o.eps
            )
            group = changed.groups[group_of(name)]
            if name in DECAYED:
                direction = direction + group.weight_decay * leaves[i]
            leaves[i] = leaves[i] - float(rate(s)) * group.rate_multiplier * direction
    for name, got, want in zip(names, jax.tree.leaves(now), leaves, strict=True):
        # Steps have size ~rate; √v̂ and the bias corrections lose some 1e-5 of it in float32.
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-5 * o.peak_rate * 10, err_msg=name)
