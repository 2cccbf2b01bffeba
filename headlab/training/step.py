"""The training step: one `shard_map` body over the mesh, compiled once, on donated state.

Gradients are sums over tokens: of micro-batches, then of devices, and are divided once by the counted tokens of the
whole step. Over `vocab` every device computes the body alike and its own rows of the vocabulary; over `data` its share
of the batch.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from headlab import models, sharding
from headlab.costs import HeadCost
from headlab.ops import sum_by_blocks, vary_like
from headlab.ops.shards import VOCAB
from headlab.training.optimizer import make_optimizer

_DROPOUT_STREAM = 0x64726F70  # sets the dropout keys apart from the keys of initialisation


class TrainState(NamedTuple):
    """All that a step reads and writes; a checkpoint holds it whole."""

    step: jax.Array  # updates made so far, int32
    params: Any  # pure nested dict
    constants: Any  # what the model holds beside its parameters, never changed
    opt_state: Any
    # sums since the last log: "nats", "weight" and the head's own metrics
    interval: dict[str, jax.Array]
    bad_step: jax.Array  # the first step whose loss or gradient was not finite, −1 if none


class Phase(NamedTuple):
    """What is static while one head trains: the module's graph, the optimizer and where the phase ends."""

    head_name: str
    end: int  # the phase makes the updates before this step
    graph: Any
    optimizer: optax.GradientTransformation
    parameters: dict[str, int]  # by part, without padding
    head_cost: HeadCost  # of training


class Own(NamedTuple):
    """What may differ between runs that are stacked, as values; a run alone has the constants of its config."""

    seed: jax.Array  # int32
    peak_rate: jax.Array  # float32


def make_phase(
    config: Any, vocab_size: int, token_counts: Any, *, head_name: str, end: int, shards: int = 1
) -> tuple[Phase, TrainState]:
    """The phase that trains `head_name` up to step `end`, and its state before any step.

    Rows of the vocabulary are padded for so many shards.
    """
    model = models.build(
        config, vocab_size, token_counts=token_counts, head_name=head_name, shards=shards
    )
    graph, params, constants = models.split(model)
    optimizer = make_optimizer(config, params)
    phase = Phase(
        head_name,
        end,
        graph,
        optimizer,
        models.count_parameters(model),
        model.head.cost("training", token_counts),
    )
    metrics = jax.eval_shape(lambda: _head_loss(model, config, *_empty_batch(config)).metrics)
    # A buffer each: a donated one must not be shared.
    interval = {key: jnp.zeros((), jnp.float32) for key in ("nats", "weight", *metrics)}
    return phase, TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        constants=constants,
        opt_state=optimizer.init(params),
        interval=interval,
        bad_step=jnp.full((), -1, jnp.int32),
    )


def _empty_batch(config: Any):
    """(states, targets, where) of one sequence."""
    ids = jnp.zeros((1, config.data.seq_len), jnp.int32)
    return jnp.zeros((*ids.shape, config.model.d_model)), ids, jnp.zeros(ids.shape, bool)


def _loss(model: models.Decoder, config: Any, batch: Any, dropout_key: jax.Array | None):
    inputs, targets, where = batch
    return _head_loss(model, config, model(inputs, dropout_key=dropout_key), targets, where)


def _head_loss(model: models.Decoder, config: Any, h: jax.Array, targets: Any, where: Any):
    return model.head.loss(
        h,
        targets,
        embedding=model.embedding,
        where=where,
        z_loss_weight=config.train.z_loss_weight,
        label_smoothing=config.train.label_smoothing,
    )


def state_specs(phase: Phase, config: Any, mesh: Mesh, state: TrainState) -> Any:
    """Where each part of a state of this phase lives on the mesh: a `TrainState` of PartitionSpecs."""
    params = sharding.param_specs(state.params, mesh, fsdp=config.mesh.fsdp)
    everywhere: Any = sharding.REPLICATED
    return TrainState(
        step=everywhere,
        params=params,
        constants=jax.tree.map(lambda _: everywhere, state.constants),
        opt_state=sharding.optimizer_specs(phase.optimizer, state.opt_state, params),
        interval=dict.fromkeys(state.interval, everywhere),
        bad_step=everywhere,
    )


def train_step(phase: Phase, config: Any, mesh: Mesh, specs: Any, *, with_own: bool = False):
    """The function (state, batch) → (state, report), to be jitted with the state donated.

    The state lives as `specs` (of `state_specs`) says. `with_own` gives (state, batch, own) → (state, report).

    `batch` is (inputs, targets, where), each [batch, length]; `report` holds float32 scalars: "nats" and "weight" of
    this step, the global gradient norm before clipping, and `bad_step`.
    """

    sum_blocks = config.head.sum_blocks if config.head.sum_order == "invariant" else None

    def body(state: TrainState, batch, own: Own | None = None):
        # Parameters are marked as varying over `data`, so that gradients stay local until the one reduction below.
        params = jax.tree.map(lambda p: vary_like(p, batch[0]), state.params)
        sums, gradients = _accumulate(phase, config, params, specs.params, state, batch, own)
        sums, gradients = _reduce(sums, gradients, specs.params)
        weight = jnp.maximum(sums["weight"], 1)  # nothing counted: gradients are exactly 0, not 0/0
        gradients = jax.tree.map(lambda g: g / weight, gradients)
        norm = global_norm(gradients, specs.params, sum_blocks)
        updates, opt_state = phase.optimizer.update(
            gradients,
            state.opt_state,
            state.params,
            norm=norm,
            peak_rate=None if own is None else own.peak_rate,
        )
        bad = ~(jnp.isfinite(sums["objective"]) & jnp.isfinite(norm))
        bad_step = jnp.where(bad & (state.bad_step < 0), state.step, state.bad_step)
        fresh = state.step % config.log.every == 0
        interval = {
            key: jnp.where(fresh, 0, old) + sums[key] for key, old in state.interval.items()
        }
        new = TrainState(
            state.step + 1,
            optax.apply_updates(state.params, updates),
            state.constants,
            opt_state,
            interval,
            bad_step,
        )
        report = {"nats": sums["nats"], "weight": sums["weight"], "gradient_norm": norm}
        return new, {
            **report,
            "bad_step": bad_step,
            **{f"interval/{k}": v for k, v in interval.items()},
        }

    return sharding.on_mesh(
        body,
        mesh,
        in_specs=(specs, sharding.BY_BATCH, *[sharding.REPLICATED] * with_own),
        out_specs=(specs, sharding.REPLICATED),
    )


def _whole(params: Any, specs: Any) -> Any:
    """Parameters that are sharded over `data` whole on every device; their gradients then are summed and cut again."""

    def whole(param, spec):
        axis = sharding.data_axis(spec)
        if axis is None:
            return param
        return jax.lax.all_gather(param, sharding.DATA, axis=axis, tiled=True)

    return jax.tree.map(whole, params, specs)


def _reduce(sums: Any, gradients: Any, specs: Any) -> tuple[Any, Any]:
    """Both summed over the devices of `data`, in one reduction; the gradients of what is cut over it are so already."""
    leaves, tree = jax.tree.flatten(gradients)
    cut = [sharding.data_axis(spec) is not None for spec in jax.tree.leaves(specs)]
    whole = [leaf for leaf, is_cut in zip(leaves, cut, strict=True) if not is_cut]
    sums, whole = jax.lax.psum((sums, whole), sharding.DATA)
    reduced = iter(whole)
    return sums, jax.tree.unflatten(
        tree,
        [leaf if is_cut else next(reduced) for leaf, is_cut in zip(leaves, cut, strict=True)],
    )


def global_norm(tree: Any, specs: Any, sum_blocks: int | None = None) -> jax.Array:
    """√Σ x² over all entries of a tree of which each device has the parts that `specs` says.

    With `sum_blocks` rows of the vocabulary are summed along the tree of `headlab.ops.softmax_tree`.
    """
    total: dict[str | None, Any] = {}
    for leaf, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(specs), strict=True):
        axis = next((name for name in spec if name is not None), None)
        if axis == VOCAB and sum_blocks:
            axis, square = None, sum_by_blocks(_square, leaf, sum_blocks)
        else:
            square = _square(leaf)
        total[axis] = total[axis] + square if axis in total else square
    reduced = [part if axis is None else jax.lax.psum(part, axis) for axis, part in total.items()]
    return jnp.sqrt(functools.reduce(jnp.add, reduced))


def _square(x: jax.Array) -> jax.Array:
    """Σ x², in row-major order however x lies in memory."""
    flat = x.reshape(-1)
    return jnp.sum(flat * flat)


def _accumulate(
    phase: Phase,
    config: Any,
    params: Any,
    specs: Any,
    state: TrainState,
    batch: Any,
    own: Own | None,
):
    """(sums, gradient of Σ objective) over this device's share of the batch, one micro-batch after another."""

    @functools.partial(jax.value_and_grad, has_aux=True)
    def objective(params, batch, key):
        model = models.merge(phase.graph, _whole(params, specs), state.constants)
        loss = _loss(model, config, batch, key)
        sums = {"objective": loss.objective, "nats": loss.nats, "weight": loss.weight}
        return loss.objective, jax.lax.stop_gradient({**sums, **loss.metrics})

    def key_of(index):
        if not config.model.dropout:
            return None
        seed = config.seed if own is None else own.seed
        stream = jax.random.fold_in(jax.random.key(seed), _DROPOUT_STREAM)
        key = jax.random.fold_in(jax.random.fold_in(stream, state.step), index)
        return jax.random.fold_in(key, jax.lax.axis_index(sharding.DATA))

    count = config.train.micro_batches
    if count == 1:
        (_, sums), gradients = objective(params, batch, key_of(0))
        return sums, gradients

    def one(total, indexed):
        index, micro_batch = indexed
        (_, sums), gradients = objective(params, micro_batch, key_of(index))
        return jax.tree.map(jnp.add, total, (sums, gradients)), None

    micro_batches = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
    sums = {key: vary_like(jnp.zeros(()), batch[0]) for key in ("objective", *state.interval)}
    zeros = (sums, jax.tree.map(lambda p: vary_like(jnp.zeros_like(p), p), params))
    total, _ = jax.lax.scan(one, zeros, (jnp.arange(count), micro_batches))
    return total


def nll_step(graph: Any, mesh: Mesh, specs: Any):
    """The function (variables, batch) → nll [batch, length] in nats, for held-out evaluation; no dropout.

    `variables` are the model's parameters, which live as `specs` says, and its constants.
    """

    def body(variables, batch):
        inputs, targets, where = batch
        params, constants = variables
        model = models.merge(graph, _whole(params, specs), constants)
        return model.head.nll(model(inputs), targets, embedding=model.embedding, where=where)

    return sharding.on_mesh(
        body,
        mesh,
        in_specs=((specs, sharding.REPLICATED), sharding.BY_BATCH),
        out_specs=sharding.BY_BATCH,
    )


def untie(tied: TrainState, untied: TrainState) -> TrainState:
    """`tied` as a state of the untied phase: the new matrix copies the table, its Adam moments the table's moments.

    `untied` gives the structure. Everything else is carried over, the step and the optimizer's counts included.
    """

    def carry(old: dict, new: dict) -> dict:
        table = jnp.copy(old["embedding"]["weight"])  # donated buffers must not be shared
        head = {**old.get("head", {}), "weight": table}
        if sorted(head) != sorted(new["head"]):
            raise ValueError(
                f"the untied head has parameters {sorted(new['head'])}, not {sorted(head)}"
            )
        return {**old, "head": head}

    def adam(old, new):
        if isinstance(old, optax.ScaleByAdamState):
            return old._replace(mu=carry(old.mu, new.mu), nu=carry(old.nu, new.nu))
        return old

    def is_adam(node):
        return isinstance(node, optax.ScaleByAdamState)

    before = jax.tree.leaves(tied.opt_state, is_leaf=is_adam)
    after = jax.tree.leaves(untied.opt_state, is_leaf=is_adam)
    flat = [adam(old, new) for old, new in zip(before, after, strict=True)]
    structure = jax.tree.structure(untied.opt_state, is_leaf=is_adam)
    return tied._replace(
        params=carry(tied.params, untied.params), opt_state=jax.tree.unflatten(structure, flat)
    )
