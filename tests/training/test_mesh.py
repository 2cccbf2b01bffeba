"""Training on meshes: the same updates, the same bits where promised, what crosses the mesh, what each device holds."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from headlab import config as configs
from headlab import sharding
from headlab.errors import UsageError
from headlab.ops import linear_cross_entropy
from headlab.training.checkpoints import Checkpoints
from headlab.training.step import make_phase, nll_step, state_specs, train_step

V = 300
TINY = {
    "model.d_model": "16",
    "model.n_layers": "1",
    "data.vocab_size": str(V),
    "data.seq_len": "8",
    "model.max_length": "8",
    "train.batch_size": "8",
    "eval.batch_size": "8",
    "head.name": "untied",
}


def make_config(**overrides):
    dotted = {key.replace("__", "."): str(value) for key, value in overrides.items()}
    return configs.load("configs/tiny.py", list({**TINY, **dotted}.items()))


def setting(config):
    """(phase, state on the mesh, specs, mesh) of a config."""
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.vocab)
    size = config.data.vocab_size
    phase, state = make_phase(
        config,
        size,
        np.arange(size, 0, -1),
        head_name=config.head.name,
        end=config.train.steps,
        shards=config.mesh.vocab,
    )
    specs = state_specs(phase, config, mesh, state)
    return phase, sharding.place(state, mesh, specs), specs, mesh


def batches(config, steps):
    rng = np.random.default_rng(0)
    size, shape = config.data.vocab_size, (config.train.batch_size, config.data.seq_len + 1)
    for _ in range(steps):
        tokens = rng.integers(0, size, shape).astype(np.int32)
        tokens[0, :4] = (0, size - 1, size // 2, size // 2 - 1)
        yield tokens[:, :-1], tokens[:, 1:], rng.random((shape[0], shape[1] - 1)) < 0.9


def run(config, steps):
    """(state, losses, gradient norms) after some steps."""
    phase, state, specs, mesh = setting(config)
    step = jax.jit(train_step(phase, config, mesh, specs), donate_argnums=0)
    losses, norms = [], []
    for batch in batches(config, steps):
        state, report = step(state, batch)
        losses.append(float(report["nats"]))
        norms.append(float(report["gradient_norm"]))
    return state, losses, norms


def moments(state):
    is_adam = lambda x: isinstance(x, optax.ScaleByAdamState)  # noqa: E731
    return next(x for x in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(x))


@functools.cache
def on_one_device(head):
    return run(make_config(head__name=head), 2)


@pytest.mark.parametrize(
    ("head", "data", "vocab", "fsdp"),
    [("untied", 2, 4, True), ("untied", 1, 8, False), ("tied", 4, 2, True)],
)
def test_any_mesh_makes_the_same_updates_but_for_rounding(head, data, vocab, fsdp):
    one, losses, norms = on_one_device(head)
    changed = dict(mesh__data=data, mesh__vocab=vocab, mesh__fsdp=str(fsdp).lower())
    many, found, found_norms = run(make_config(head__name=head, **changed), 2)
    assert found == pytest.approx(losses, rel=1e-6)
    assert found_norms == pytest.approx(norms, rel=1e-5)
    # Adam's first moments are sums of gradients: compared in place of signs that first updates are made of.
    for a, b in zip(
        jax.tree.leaves(moments(one).mu), jax.tree.leaves(moments(many).mu), strict=True
    ):
        np.testing.assert_allclose(a, b[: len(a)] if a.ndim else b, rtol=0, atol=1e-7)
    kernel = many.params["blocks"][0]["mlp"]["up"]["kernel"]
    share = kernel.addressable_shards[0].data.size / kernel.size
    assert share == (1 / data if fsdp else 1)
    table = many.params["embedding"]["weight"]
    assert table.addressable_shards[0].data.shape[0] == table.shape[0] / vocab


def trained_200_steps(vocab):
    """(parameters and moments, losses, norms, scored tokens)."""
    config = configs.load(
        "configs/micro.py",
        [
            ("head.name", "tied"),
            ("head.sum_order", "invariant"),
            ("mesh.vocab", str(vocab)),
            ("model.n_layers", "1"),
            ("model.dropout", "0.1"),
            ("data.seq_len", "16"),
            ("train.batch_size", "4"),
            ("train.micro_batches", "2"),
            ("train.steps", "200"),
            ("train.z_loss_weight", "1e-4"),
        ],
    )
    state, losses, norms = run(config, 200)
    phase, _, specs, mesh = setting(config)
    tokens = np.random.default_rng(1).integers(0, 8192, (64, 17)).astype(np.int32)
    batch = (tokens[:, :-1], tokens[:, 1:], np.ones((64, 16), bool))
    nll = jax.jit(nll_step(phase.graph, mesh, specs.params))
    scored = np.asarray(nll((state.params, state.constants), batch)).reshape(-1)[:1000]
    assert len(scored) == 1000 and np.isfinite(scored).all()
    return jax.device_get((state.params, state.opt_state)), losses, norms, scored


on_one_shard = functools.cache(functools.partial(trained_200_steps, 1))


@pytest.mark.optimised
@pytest.mark.slow
@pytest.mark.parametrize(
    "vocab", [8, *(pytest.param(vocab, marks=pytest.mark.full) for vocab in (2, 4))]
)
def test_200_steps_end_in_the_same_bits_on_any_number_of_shards(vocab):
    """Micro-shaped, one block of its four; every parameter, moment, logged loss and norm, and 1,000 scored tokens."""
    one, many = on_one_shard(), trained_200_steps(vocab)
    _, losses, *_ = one
    assert losses[-1] != losses[0]
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        np.testing.assert_array_equal(a, b)


# --- what crosses the mesh ---------------------------------------------------------------------------------------

WIDTH = {"f32": 4, "s32": 4, "u32": 4, "pred": 1, "bf16": 2, "f64": 8}
COLLECTIVE = re.compile(
    r"= (\(?[^=]*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\("
)


def collectives(text):
    """[(kind, bytes, axis)] of all collectives that a compiled program runs, those of loops as often as they turn."""
    bodies, name = {}, None
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if opened := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = "ENTRY" if opened[1] else opened[2]
            bodies[name] = []
        elif name:
            bodies[name].append(line)

    def walk(name):
        for line in bodies[name]:
            if match := COLLECTIVE.search(line):
                shapes = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
                size = sum(
                    WIDTH[t] * math.prod(map(int, s.split(","))) if s else WIDTH[t]
                    for t, s in shapes
                )
                yield match[2], size, axis_of(line)
            turns = 1
            if " while(" in line:
                known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                inside = list(walk(re.search(r"body=%?([\w.\-]+)", line)[1]))
                assert known or not inside, (
                    f"a collective in a loop of unknown length: {line[:200]}"
                )
                turns = int(known[1]) if known else 0
                yield from inside * turns
                continue
            for called in re.findall(
                r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)", line
            ):
                yield from walk(called)
            if branches := re.search(r"branch_computations=\{([^}]*)\}", line):
                for called in branches[1].split(","):
                    yield from walk(called.strip().lstrip("%"))

    return list(walk("ENTRY"))


# the groups of devices along each axis of a mesh of 2 × 4
AXES = {
    frozenset({(0, 1, 2, 3), (4, 5, 6, 7)}): "vocab",
    frozenset({(0, 4), (1, 5), (2, 6), (3, 7)}): "data",
}


def axis_of(line):
    """The mesh axis that a collective crosses; newer versions of XLA name it."""
    if named := re.search(r"replica_groups=mesh\[[^\]]*\] \{'(\w+)'\}", line):
        return named[1]
    if listed := re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", line):
        groups = [tuple(map(int, g.split(","))) for g in re.findall(r"\{([\d,]+)\}", listed[1])]
    else:
        iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
        shape, dims = (tuple(map(int, iota[i].split(","))) for i in (1, 2))
        ids = np.arange(math.prod(dims)).reshape(dims)
        if iota[3]:
            ids = ids.transpose(tuple(map(int, iota[3].split(","))))
        groups = [tuple(g) for g in ids.reshape(shape).tolist()]
    return AXES[frozenset(groups)]


def crossing(vocab_size):
    """({axis: [(kind, bytes)]}, local bytes of all gradients) of a compiled step on a mesh of 2 × 4."""
    config = make_config(
        data__vocab_size=vocab_size, head__vocab_multiple=128, mesh__data=2, mesh__vocab=4
    )
    phase, state, specs, mesh = setting(config)
    batch = next(batches(config, 1))
    text = jax.jit(train_step(phase, config, mesh, specs)).lower(state, batch).compile().as_text()
    found = {"vocab": [], "data": []}
    for kind, size, axis in collectives(text):
        found[axis].append((kind, size))
    local = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state.params))
    return found, local


@pytest.mark.slow
@pytest.mark.optimised
def test_what_crosses_vocab_does_not_grow_with_the_vocabulary_and_data_is_reduced_once():
    (small, small_local), (large, large_local) = crossing(8192), crossing(65536)
    assert small["vocab"] and sum(size for _, size in small["vocab"]) == sum(
        size for _, size in large["vocab"]
    )
    assert sum(size for _, size in small["vocab"]) < 8192 * 16 * 4 / 4  # less than a shard's table
    for found, local in ((small, small_local), (large, large_local)):
        assert {kind for kind, _ in found["data"]} == {"all-reduce"}
        total = sum(size for _, size in found["data"])
        assert local <= total <= local + 64  # the gradients once, and a few sums


@pytest.mark.optimised
@pytest.mark.parametrize("vocab", [1, 8])
def test_what_a_device_holds_of_the_tables_falls_with_the_shards(vocab):
    """8,192 tokens, V 256,000, d 2,304, read from the compiled loss with gradients: nothing is run."""
    tokens, size, d = 8192, 256_000, 2304
    mesh = sharding.make_mesh(1, vocab)

    def loss(h, weight, targets):
        return jax.value_and_grad(
            lambda h, weight: linear_cross_entropy(h, weight, targets), argnums=(0, 1)
        )(h, weight)

    rows, everywhere = sharding.BY_ROWS, sharding.REPLICATED
    step = sharding.on_mesh(
        loss,
        mesh,
        in_specs=(everywhere, rows, everywhere),
        out_specs=(everywhere, (everywhere, rows)),
    )
    arguments = [
        sharding.abstract(jax.ShapeDtypeStruct(shape, dtype), mesh, spec)
        for shape, dtype, spec in (
            ((tokens, d), jnp.float32, everywhere),
            ((size, d), jnp.float32, rows),
            ((tokens,), jnp.int32, everywhere),
        )
    ]
    memory = jax.jit(step).lower(*arguments).compile().memory_analysis()
    states, table, block = 4 * tokens * d, 4 * size * d / vocab, 32 << 20
    assert memory.argument_size_in_bytes == pytest.approx(states + table, rel=0.01)
    assert memory.output_size_in_bytes == pytest.approx(states + table, rel=0.01)
    assert memory.temp_size_in_bytes < block + 2 * states


# --- checkpoints -------------------------------------------------------------------------------------------------

MESHES = [(1, 1), (8, 1), (1, 8), (2, 4)]


def elastic(data, vocab, **changed):
    # a multiple of 5: 300 rows on one shard, 320 on eight
    return setting(
        make_config(mesh__data=data, mesh__vocab=vocab, head__vocab_multiple=5, **changed)
    )


@pytest.mark.parametrize("saved", MESHES)
def test_a_checkpoint_restores_on_any_mesh(saved, tmp_path):
    _, state, _, _ = elastic(*saved)
    rng = np.random.default_rng(0)

    def filled(path, leaf):
        values = np.asarray(rng.integers(1, 100, leaf.shape), leaf.dtype)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if sharding.is_rows(name):
            values[V:] = 0
        return jax.device_put(values, leaf.sharding)

    state = jax.tree_util.tree_map_with_path(filled, state)
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(3, state, {"vocab_size": V}, wait=True)
        for mesh_shape in MESHES:
            _, other, specs, mesh = elastic(*mesh_shape)
            target = sharding.abstract(other, mesh, specs)
            found, _, _ = checkpoints.restore(target, vocab_size=V)
            for a, b, like in zip(
                jax.tree.leaves(state), jax.tree.leaves(found), jax.tree.leaves(target), strict=True
            ):
                assert b.sharding == like.sharding and b.shape == like.shape
                a, b = (np.atleast_1d(np.asarray(x)) for x in (a, b))
                real = min(len(a), len(b))
                np.testing.assert_array_equal(a[:real], b[:real])
                assert not np.any(b[real:])


def test_a_checkpoint_of_another_vocabulary_is_refused(tmp_path):
    _, state, specs, mesh = elastic(1, 1)
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(3, state, {"vocab_size": V}, wait=True)
        _, fewer, _, _ = elastic(1, 1, data__vocab_size=290)
        target = sharding.abstract(fewer, mesh, specs)
        with pytest.raises(UsageError, match="a vocabulary of 300 tokens, not of 290"):
            checkpoints.restore(target, vocab_size=290)
        # without the recorded size, rows that hold numbers are never taken away
        with pytest.raises(UsageError, match="300 rows, .* beyond the 290 wanted"):
            checkpoints.restore(target, vocab_size=V)
