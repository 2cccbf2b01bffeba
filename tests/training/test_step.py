"""One training step: its sums, its devices, its phases."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_decoder
from flax import nnx

from headlab import config as configs
from headlab import heads, models, sharding
from headlab.errors import UsageError
from headlab.training.step import make_phase, state_specs, train_step, untie

V = 300
TINY = {
    "model.d_model": "16",
    "model.n_layers": "1",
    "data.vocab_size": str(V),
    "data.seq_len": "8",
    "model.max_length": "8",
    "head.vocab_multiple": "64",
    "train.batch_size": "4",
    "eval.batch_size": "4",
}


# Heads that differ in what the step sees of them: what they tie to, constants, metrics of their own.
KINDS = ("tied", "untied", "adaptive", "mixture_of_softmaxes")
COUNTS = np.arange(V, 0, -1)  # what heads that sort tokens by frequency sort by


def make_config(**overrides):
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return configs.load("configs/tiny.py", list({**TINY, **dotted}.items()))


def make_batch(n=4, length=8, seed=0):
    tokens = np.random.default_rng(seed).integers(0, V, (n, length + 1)).astype(np.int32)
    return tokens[:, :-1], tokens[:, 1:], np.ones((n, length), bool)


@functools.cache
def compiled(recorded, data):
    """(jitted step, fresh state, mesh) of a config, traced once for all tests that use it."""
    config = configs.from_json(recorded)
    mesh = sharding.make_mesh(data, config.mesh.vocab)
    shards = config.mesh.vocab
    name, end = config.head.name, config.train.steps
    phase, fresh = make_phase(config, V, COUNTS, head_name=name, end=end, shards=shards)
    specs = state_specs(phase, config, mesh, fresh)
    return jax.jit(train_step(phase, config, mesh, specs)), fresh, mesh, specs


def run(config, batch, *, data=1, steps=1, state=None):
    step, fresh, mesh, specs = compiled(configs.to_json(config), data)
    state = sharding.place(fresh if state is None else state, mesh, specs)
    for _ in range(steps):
        state, report = step(state, batch)
    return state, report


def assert_close(a, b, tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance)


@pytest.mark.parametrize("head", ["tied", "untied"])
def test_the_reported_loss_is_the_plain_float64_cross_entropy(head):
    config = make_config(head__name=head, train__z_loss_weight="0.1", train__label_smoothing="0.1")
    batch = make_batch()
    batch[2][1, 3:] = False
    _, state = make_phase(config, V, None, head_name=head, end=1)
    log_probs = reference_decoder.log_probs(state.params, config.model, batch[0], V)
    nll = -np.take_along_axis(log_probs, batch[1][..., None], -1)[..., 0]
    _, report = run(config, batch)
    assert float(report["weight"]) == batch[2].sum()
    assert float(report["nats"]) == pytest.approx(nll[batch[2]].sum(), rel=1e-5)


def test_micro_batches_of_unequal_counts_weigh_every_token_alike():
    """Micro-batches with 1 and 7 counted tokens: Σ nats ÷ 8, not the mean of two means."""
    whole, parts = (
        make_config(train__batch_size="2"),
        make_config(train__batch_size="2", train__micro_batches="2"),
    )
    batch = make_batch(2)
    batch[2][:] = False
    batch[2][0, 0] = True
    batch[2][1, :7] = True
    (a, ra), (b, rb) = run(whole, batch), run(parts, batch)
    assert float(ra["weight"]) == float(rb["weight"]) == 8
    assert float(ra["nats"]) == pytest.approx(float(rb["nats"]), rel=1e-6)
    assert float(ra["gradient_norm"]) == pytest.approx(float(rb["gradient_norm"]), rel=1e-5)
    # Adam's first moments are (1 − b1) · gradient: compared in place of signs that a first update is made of.
    assert_close(moments(a).mu, moments(b).mu, 1e-7)


def moments(state):
    is_adam = lambda x: isinstance(x, optax.ScaleByAdamState)  # noqa: E731
    return next(x for x in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(x))


@pytest.mark.parametrize(
    ("head", "data"),
    [
        ("tied", 4),
        *(pytest.param(name, 2, marks=[pytest.mark.slow] * (name != "untied")) for name in KINDS),
    ],
)
def test_devices_along_data_change_nothing_but_rounding(head, data):
    config = make_config(head__name=head)
    batch = make_batch()
    batch[2][0] = False  # devices with unequal counts
    one, r1 = run(config, batch)
    many, rn = run(config, batch, data=data)
    assert float(r1["nats"]) == pytest.approx(float(rn["nats"]), rel=1e-6)
    assert float(r1["gradient_norm"]) == pytest.approx(float(rn["gradient_norm"]), rel=1e-5)
    assert_close(moments(one).mu, moments(many).mu, 1e-7)


def test_a_step_that_counts_nothing_moves_nothing_but_decay():
    config = make_config(groups__embedding__weight_decay="0", groups__body__weight_decay="0")
    batch = make_batch()
    batch[2][:] = False
    _, before = make_phase(config, V, None, head_name="tied", end=1)
    after, report = run(config, batch)
    assert_close(before.params, after.params, 0)
    assert float(report["nats"]) == float(report["weight"]) == float(report["gradient_norm"]) == 0
    assert int(after.bad_step) == -1


@pytest.mark.parametrize("head", KINDS)
def test_every_parameter_moves_in_one_step_and_padding_rows_never(head):
    bias = {"head__bias": "true"} if "bias" in heads.options(head) else {}
    config = make_config(head__name=head, **bias)
    _, before = make_phase(config, V, COUNTS, head_name=head, end=1)
    after, _ = run(config, make_batch(), steps=2)
    for path, old in jax.tree_util.tree_leaves_with_path(before.params):
        new = after.params
        for entry in path:
            new = new[entry.key]
        assert (np.asarray(old) != np.asarray(new)).any(), path
        if old.shape[0] == 320:
            np.testing.assert_array_equal(new[V:], 0, err_msg=str(path))


def test_a_tied_table_gets_the_sum_of_its_two_gradients():
    config = make_config()
    model = models.build(config, V)
    inputs, targets, where = make_batch()

    def loss(table_in, table_out):
        graph, state = nnx.split(model)
        pure = nnx.to_pure_dict(state)
        pure["embedding"]["weight"] = table_in
        decoder = nnx.merge(graph, nnx.State(pure))
        h = decoder(inputs)
        decoder.embedding.weight = nnx.Param(table_out)
        out = decoder.head.loss(h, targets, embedding=decoder.embedding, where=where)
        return out.objective / out.weight

    table = model.embedding.weight[...]
    through_input, through_output = jax.grad(loss, (0, 1))(table, table)
    after, _ = run(config, (inputs, targets, where))
    mean = moments(after).mu["embedding"]["weight"] / (1 - config.optimizer.b1)
    norm = config.optimizer.clip_norm
    _, report = run(config, (inputs, targets, where))
    clipped = min(1, norm / float(report["gradient_norm"]))
    expected = (through_input + through_output) * clipped
    np.testing.assert_allclose(mean, expected, rtol=0, atol=1e-6)
    assert np.abs(through_input).max() > 1e-4 and np.abs(through_output).max() > 1e-4


def test_the_first_step_that_is_not_finite_is_remembered():
    config = make_config()
    good, bad = make_batch(), make_batch()
    bad[1][0, 0] = V  # outside the vocabulary at a counted position
    state, _ = run(config, good)
    state, report = run(config, bad, state=state)
    assert int(report["bad_step"]) == 1
    state, report = run(config, good, state=state)
    assert int(report["bad_step"]) == 1


def test_the_interval_sums_begin_again_after_each_log():
    config = make_config(log__every="2")
    batch = make_batch()
    state, total = None, []
    for _ in range(4):
        state, report = run(config, batch, state=state)
        total.append((float(report["nats"]), float(report["interval/nats"])))
    assert total[1][1] == pytest.approx(total[0][0] + total[1][0], rel=1e-6)
    assert total[2][1] == pytest.approx(total[2][0], rel=1e-6)
    assert total[3][1] == pytest.approx(total[2][0] + total[3][0], rel=1e-6)


def test_dropout_differs_by_step_and_by_device_and_repeats():
    config = make_config(model__dropout="0.5")
    batch = make_batch(4)
    batch = tuple(np.repeat(x[:1], 4, 0) for x in batch)
    (a, _), (b, _) = run(config, batch, data=2, steps=2), run(config, batch, data=2, steps=2)
    assert_close(a.params, b.params, 0)
    first, _ = run(config, batch)
    other = run(config, batch, state=first._replace(params=run(config, batch)[0].params))[1]
    assert float(other["nats"]) != float(run(config, batch)[1]["nats"])


def test_untying_copies_the_table_and_its_moments_and_nothing_else_changes():
    config = make_config(head__untie_at="0.5", head__bias="true")
    tied, _ = run(config, make_batch(), steps=3)
    _, fresh = make_phase(config, V, None, head_name="untied", end=60)
    untied = untie(tied, fresh)
    table = tied.params["embedding"]["weight"]
    np.testing.assert_array_equal(untied.params["head"]["weight"], table)
    np.testing.assert_array_equal(untied.params["head"]["bias"], tied.params["head"]["bias"])
    for kind in ("mu", "nu"):
        old, new = getattr(moments(tied), kind), getattr(moments(untied), kind)
        np.testing.assert_array_equal(new["head"]["weight"], old["embedding"]["weight"])
        assert np.abs(new["head"]["weight"]).max() > 0
        del new["head"], old["head"]
        assert_close(old, new, 0)
    assert int(untied.step) == 3 and int(moments(untied).count) == 3
    inputs = make_batch()[0]
    same = [reference_decoder.log_probs(s.params, config.model, inputs, V) for s in (tied, untied)]
    np.testing.assert_array_equal(*same)


@pytest.mark.parametrize(
    ("head", "dtype"),
    [
        *((name, "float32") for name in heads.names()),
        *(pytest.param(name, "bfloat16", marks=pytest.mark.slow) for name in KINDS),
    ],
)
def test_the_whole_step_lowers_for_tpu_and_cuda(head, dtype):
    config = make_config(
        head__name=head, train__compute_dtype=dtype, train__micro_batches="2", model__dropout="0.1"
    )
    phase, state = make_phase(config, V, COUNTS, head_name=head, end=1)
    mesh = sharding.make_mesh(1)
    step = jax.jit(train_step(phase, config, mesh, state_specs(phase, config, mesh, state)))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, make_batch()))
    exported = jax.export.export(step, platforms=["tpu", "cuda"])(*shapes)
    assert set(exported.platforms) == {"tpu", "cuda"}
    text = exported.mlir_module()
    assert "f64" not in text  # nothing in a hot path is float64


def test_bfloat16_compute_keeps_float32_parameters_and_a_close_loss():
    batch = make_batch()
    _, r32 = run(make_config(), batch)
    narrow, r16 = run(make_config(train__compute_dtype="bfloat16"), batch)
    assert {x.dtype for x in jax.tree.leaves(narrow.params)} == {jnp.dtype(jnp.float32)}
    assert float(r16["nats"]) == pytest.approx(float(r32["nats"]), rel=1e-2)


def test_a_mesh_that_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(UsageError) as e:
        sharding.make_mesh(64)
    assert "64" in str(e.value) and str(jax.device_count()) in str(e.value)
