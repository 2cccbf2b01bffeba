"""Configurations, parameters and batches that are the same on every machine, and headlab trained on them.

Numbers come from an integer hash (the finaliser of SplitMix64), exact in float32, so that goldens made once can be
compared anywhere.
"""

import math
import zlib
from typing import NamedTuple

import jax
import numpy as np
import optax

from headlab import config as configs
from headlab import sharding
from headlab.training.step import make_phase, state_specs, train_step

SEED = 0
STEPS = 3
VOCABULARY = 61  # padded to 64 rows
BATCH, LENGTH = 4, 8
PEAK_RATE = 2e-3
EPSILON = 1e-2  # of Adam; of the size of gradients, so that an update depends smoothly on them

BASE = {
    "model.d_model": "16",
    "model.n_layers": "2",
    "model.n_heads": "4",
    "model.max_length": "12",
    "head.vocab_multiple": "64",
    "data.seq_len": str(LENGTH),
    "optimizer.peak_rate": str(PEAK_RATE),
    "optimizer.eps": str(EPSILON),
    "optimizer.warmup_steps": "2",
    "optimizer.b1": "0.8",
    "train.steps": "5",
    "train.batch_size": str(BATCH),
}
GOLDEN = {
    "tied": {
        "head.bias": "true",
        "head.softcap": "2.0",
        "train.label_smoothing": "0.1",
        "optimizer.clip_norm": "0.5",
    },
    "untied": {
        "model.position": "rotary",
        "model.norm": "layer",
        "model.bias": "true",
        "model.activation": "swiglu",
        "model.n_kv_heads": "2",
        "head.name": "untied",
        "head.bias": "true",
        "head.logit_scale": "0.7",
        "train.z_loss_weight": "0.01",
        "train.micro_batches": "2",
        "optimizer.schedule": "linear",
        "groups.embedding.rate_multiplier": "2.0",
        "groups.embedding.weight_decay": "0.0",
        "groups.head.rate_multiplier": "0.5",
        "groups.head.weight_decay": "0.5",
    },
}


class Trained(NamedTuple):
    """What STEPS steps gave. Arrays by path, "blocks/0/mlp/up/kernel" and so on."""

    loss: list[float]  # pure cross-entropy of each step, nats a counted token
    gradient_norm: list[float]  # of each step, before clipping
    gradients: dict[str, np.ndarray]  # of the first step, clipped
    parameters: dict[str, np.ndarray]  # after the last step


def config_of(overrides: dict[str, str]):
    """The resolved configuration of BASE and `overrides`."""
    config = configs.default_config()
    # the head decides which of its options exist
    for key, text in sorted({**BASE, **overrides}.items(), key=lambda kv: kv[0] != "head.name"):
        configs.override(config, key, text)
    return configs.resolve(config)


def noise(label: str, count: int) -> np.ndarray:
    """`count` multiples of 2⁻²⁴ in [−½, ½), as good as uniform and independent, from a name alone; float64."""
    stream = np.uint64(zlib.crc32(f"{SEED}/{label}".encode()))
    x = (np.arange(1, count + 1, dtype=np.uint64) + (stream << np.uint64(32))) * np.uint64(
        0x9E3779B97F4A7C15
    )
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(40)).astype(np.float64) / 2**24 - 0.5


def batch(step: int):
    """(inputs, targets, where) of a step: row 1 counts nothing, a tenth of the other positions neither."""
    tokens = np.floor((noise(f"tokens/{step}", BATCH * (LENGTH + 1)) + 0.5) * VOCABULARY)
    tokens = tokens.astype(np.int32).reshape(BATCH, LENGTH + 1)
    where = (noise(f"where/{step}", BATCH * LENGTH) > -0.4).reshape(BATCH, LENGTH)
    where[1] = False
    return tokens[:, :-1], tokens[:, 1:], where


def flatten(params) -> dict[str, np.ndarray]:
    """The leaves of headlab's nested dict by path, as NumPy arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {"/".join(str(e.key) for e in path): np.asarray(leaf) for path, leaf in leaves}


def start(config):
    """(phase, state) of headlab before its first step, at parameters of which none is zero or one.

    Gains, biases and padding rows, which headlab starts at one and zero, differ from that too.
    """
    phase, state = make_phase(config, VOCABULARY, None, head_name=config.head.name, end=1)
    values = [_initial(path, leaf.shape) for path, leaf in flatten(state.params).items()]
    params = jax.tree.unflatten(jax.tree.structure(state.params), values)
    return phase, state._replace(params=params)


def _initial(path: str, shape: tuple[int, ...]) -> np.ndarray:
    # kernels are [d_in, d_out], tables [rows, d]; uniform noise has standard deviation 1/√12
    fan_in = shape[0] if path.endswith("kernel") else shape[-1]
    scale = math.sqrt(12 / fan_in) if len(shape) == 2 else 0.5
    values = noise(path, math.prod(shape)).reshape(shape) * scale
    return (values + (path.endswith("gain"))).astype(np.float32)


def train_headlab(config, phase, state) -> Trained:
    """headlab's own step on the recipe's batches, from what `start` gave."""
    mesh = sharding.make_mesh(1)
    specs = state_specs(phase, config, mesh, state)
    state = sharding.place(state, mesh, specs)
    step = jax.jit(train_step(phase, config, mesh, specs))
    losses, norms, gradients = [], [], {}
    for index in range(STEPS):
        state, report = step(state, batch(index))
        losses.append(float(report["nats"]) / float(report["weight"]))
        norms.append(float(report["gradient_norm"]))
        if index == 0:
            # from zero, Adam's first moment becomes (1 − b1) · gradient
            moments = flatten(optax.tree.get(state.opt_state, "mu"))
            gradients = {p: m / (1 - config.optimizer.b1) for p, m in moments.items()}
    return Trained(losses, norms, gradients, flatten(state.params))
