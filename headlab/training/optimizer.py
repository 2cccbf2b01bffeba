"""AdamW with three groups of parameters, a schedule, and weight decay chosen by the parameter's path.

Loshchilov & Hutter 2019, "Decoupled weight decay regularization". All transformations are optax's.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

GROUPS = ("embedding", "head", "body")

# Every parameter is named here by the last part of its path; a new name must be sorted before it can be trained.
_DECAYED = frozenset({"weight", "kernel", "positions"})
_NOT_DECAYED = frozenset({"gain", "bias"})


def group_of(path: str) -> str:
    """The optimizer group of a parameter path such as "blocks/0/mlp/up/kernel"."""
    top = path.split("/")[0]
    return {"embedding": "embedding", "positions": "embedding", "head": "head"}.get(top, "body")


def is_decayed(path: str) -> bool:
    """Whether weight decay applies: to matrices, never to gains and biases.

    Raises ValueError for a parameter whose name has not been sorted.
    """
    name = path.split("/")[-1]
    if name not in _DECAYED | _NOT_DECAYED:
        raise ValueError(
            f"nothing says whether weight decay applies to the parameter {path!r}; name it like one of "
            f"{sorted(_DECAYED | _NOT_DECAYED)}, or sort its name in headlab/training/optimizer.py"
        )
    return name in _DECAYED


def paths(params: Any) -> Any:
    """A tree of the parameters' paths, "blocks/0/mlp/up/kernel" and so on."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "/".join(str(entry.key) for entry in path), params
    )


def schedule(optimizer: Any, steps: int, peak: Any = None) -> optax.Schedule:
    """The rate of update s = 0 … steps − 1; `peak` stands for `optimizer.peak_rate` where it is given.

    Warm-up (s + 1)/w · peak for s < w; after that, with p = (s − w)/(steps − w) and the final fraction f, constant
    peak, linear peak·(1 − (1 − f)·p), or cosine peak·(f + (1 − f)·(1 + cos πp)/2).
    """
    peak = optimizer.peak_rate if peak is None else peak
    fraction, warmup = optimizer.final_fraction, optimizer.warmup_steps
    rest = steps - warmup
    decay = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, peak * fraction, rest),
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, alpha=fraction),
    }[optimizer.schedule]()
    if not warmup:
        return decay
    rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, decay], [warmup])


def clip_by_norm(largest: float) -> optax.GradientTransformationExtraArgs:
    """Scales updates by min(1, largest / norm), with the norm that `update(…, norm=…)` is given."""

    def update(updates, state, params=None, *, norm, **_):
        del params

        def clip(t):
            return jnp.where(norm < largest, t, (t / norm.astype(t.dtype)) * largest)

        return jax.tree.map(clip, updates), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def scale_by_rate(optimizer: Any, steps: int) -> optax.GradientTransformationExtraArgs:
    """Scales updates by minus the scheduled rate, whose peak `update(…, peak_rate=…)` may give as a value."""
    fixed = optax.scale_by_learning_rate(schedule(optimizer, steps))

    def update(updates, state, params=None, *, peak_rate=None, **_):
        if peak_rate is None:
            return fixed.update(updates, state, params)
        given = optax.scale_by_learning_rate(schedule(optimizer, steps, peak_rate))
        return given.update(updates, state, params)

    return optax.GradientTransformationExtraArgs(fixed.init, update)


def make_optimizer(config: Any, params: Any) -> optax.GradientTransformationExtraArgs:
    """Clip by global norm, Adam, weight decay and rate multiplier by group, then the scheduled rate.

    Its `update` is given the global norm of the gradients as `norm=`: of sharded ones it cannot know it. It may be
    given the peak rate as `peak_rate=`, a value in place of the config's constant.
    update = −rate(s) · multiplier_g · (m̂/(√v̂ + ε) + decay_g · parameter, where it decays).
    """
    names = paths(params)

    def members(group: str, *, decayed: bool) -> Any:
        return jax.tree.map(
            lambda path: group_of(path) == group and (is_decayed(path) or not decayed), names
        )

    o = config.optimizer
    chain = [] if o.clip_norm is None else [clip_by_norm(o.clip_norm)]
    chain.append(optax.scale_by_adam(o.b1, o.b2, o.eps))
    for group in GROUPS:
        chosen = config.groups[group]
        chain.append(optax.add_decayed_weights(chosen.weight_decay, members(group, decayed=True)))
        if chosen.rate_multiplier != 1:
            scale = optax.scale(chosen.rate_multiplier)
            chain.append(optax.masked(scale, members(group, decayed=False)))
    chain.append(scale_by_rate(o, config.train.steps))
    return optax.chain(*chain)
