"""Promises about devices, compilers, memory, the first step and bad input that every registered head keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from traced import largest_array

from headlab import heads, sharding
from headlab.errors import UsageError

EVERYWHERE = sharding.REPLICATED


MESHES = [(2, 4), (1, 8), (4, 2), (1, 2), (8, 1), (1, 4), (1, 1)]


@pytest.mark.quick()
@pytest.mark.in_turn(("data", "vocab"), MESHES)
def test_any_mesh_equals_one_device(name, data, vocab, make, contract):
    """Sixteen sequences; some count nothing; every id is a target and looked up. Gradients are taken inside.

    Rows are sharded over `vocab`, their eleven tokens padded to sixteen rows and those of clusters to eight each, so
    that some shards hold padding alone.
    """
    problem = make(contract.loaded_case(name))
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.normal(size=(16, 4, contract.width)), jnp.float32)
    targets = (np.arange(64, dtype=np.int32) * 7 % contract.vocab).reshape(16, 4)
    ids = np.roll(targets, 1)
    where = rng.random((16, 4)) < 0.6
    where[:2] = False

    def objective(params, h, ids, targets, where):
        _, embedding = problem.modules(params)
        h = h + embedding(ids)
        loss = problem.call("loss", params, h, targets, where=where, z_loss_weight=0.1)
        nll = problem.call("nll", params, h, targets, where=where)
        return loss.objective + jnp.sum(nll), (loss, nll)

    def step(params, *arrays):
        grad = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
        (_, (loss, nll)), (dparams, dh) = grad(params, *arrays)
        scored = (
            problem.call("log_probs", params, arrays[0]),
            problem.call("top_k", params, arrays[0], 3),
            problem.call("entropy", params, arrays[0]),
        )
        return loss, dparams, dh, (nll, scored)

    def body(params, *arrays):
        loss, *rest = step(params, *arrays)
        return jax.lax.psum(loss, "data"), *rest

    mesh, specs = sharding.make_mesh(data, vocab), problem.specs()
    batch = sharding.BY_BATCH
    sharded = sharding.on_mesh(
        body,
        mesh,
        in_specs=(specs, batch, batch, batch, batch),
        out_specs=(EVERYWHERE, specs, batch, batch),
    )
    arrays = (h, ids, targets, where)
    found, wanted = (jax.jit(f)(problem.params, *arrays) for f in (sharded, step))
    # Only the order of sums and the shapes of the multiplies differ.
    for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(wanted[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=2 * problem.value_tolerance)
    for a, b in zip(jax.tree.leaves(found[1:3]), jax.tree.leaves(wanted[1:3]), strict=True):
        difference, norm = contract.error(a, b)
        assert difference <= 2 * problem.gradient_tolerance * norm
    (nll, (log_probs, (values, ids), entropy)), (nll_1, (log_probs_1, best, entropy_1)) = (
        found[3],
        wanted[3],
    )
    for a, b in ((nll, nll_1), (log_probs, log_probs_1), (entropy, entropy_1), (values, best[0])):
        np.testing.assert_allclose(a, b, atol=2 * problem.value_tolerance)
    np.testing.assert_array_equal(ids, best[1])


@pytest.mark.optimised
@pytest.mark.quick("tied")
@pytest.mark.in_turn(("vocab",), [(8,), (2,), (4,)])
def test_the_invariant_order_gives_the_same_bits_on_any_number_of_shards(
    name, vocab, make, contract
):
    """Loss and nll, each with its gradients in the states and in every parameter, by the lookup too; eight blocks."""
    problem = make(contract.loaded_case(name))
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.normal(size=(5, 4, contract.width)), jnp.float32)
    targets = (np.arange(20, dtype=np.int32) * 7 % contract.vocab).reshape(5, 4)
    where = rng.random((5, 4)) < 0.8

    def body(params, h, targets, where):
        def value(params, h, method, **options):
            head, embedding = problem.modules(params)
            head.sum_in_blocks(8)
            states = h + embedding(jnp.roll(targets, 1))
            call = getattr(head, method)
            return call(states, targets, embedding=embedding, where=where, **options)

        def loss(params, h):
            out = value(params, h, "loss", z_loss_weight=0.1)
            return out.objective, out

        def nll(params, h):
            out = value(params, h, "nll")
            return jnp.sum(out), out

        return [jax.value_and_grad(f, argnums=(0, 1), has_aux=True)(params, h) for f in (loss, nll)]

    specs = problem.specs()
    one, many = (
        jax.jit(
            sharding.on_mesh(
                body,
                sharding.make_mesh(1, n),
                in_specs=(specs, EVERYWHERE, EVERYWHERE, EVERYWHERE),
                out_specs=[(EVERYWHERE, (specs, EVERYWHERE))] * 2,
            )
        )(problem.params, h, targets, where)
        for n in (1, vocab)
    )
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.in_turn(("dtype",), [("float32",), ("bfloat16",)])
def test_loss_and_gradient_lower_for_tpu_and_cuda(name, dtype, make, contract):
    """Needs neither: only the CPU is there."""
    assert {d.platform for d in jax.devices()} == {"cpu"}
    problem = make(contract.loaded_case(name, dtype), token_block=None, row_block=None)

    def step(params, h, targets, where):
        def objective(params, h):
            loss = problem.call("loss", params, h, targets, where=where, z_loss_weight=0.1)
            return loss.objective, loss

        return jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)(params, h)

    arguments = (problem.params, problem.h, problem.targets, problem.where)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments)
    exported = jax.export.export(jax.jit(step), platforms=["tpu", "cuda"])(*shapes)
    assert exported.platforms == ("tpu", "cuda")


@pytest.mark.quick()
def test_the_first_loss_is_the_log_of_the_vocabulary(name, contract):
    """Within 5%, for normalised states (norm √d) and uniform targets, at the defaults and with all options changed."""
    vocab, width = 1000, 64
    rng = np.random.default_rng(0)
    h = rng.normal(size=(512, width))
    h = jnp.asarray(h / np.sqrt((h**2).mean(axis=1, keepdims=True)), jnp.float32)
    targets = rng.integers(0, vocab, 512).astype(np.int32)
    choices = contract.one_by_one(name)
    for chosen in (choices[0], choices[-1]):
        graphs, states, constants = contract.initial(
            name, vocab, width, vocab_multiple=128, **chosen
        )

        @jax.jit
        def loss(states, constants, graphs=graphs):
            head, embedding = map(nnx.merge, graphs, states, constants)
            return head.loss(h, targets, embedding=embedding)

        found = loss(states, constants)
        first = float(found.nats / found.weight)
        assert abs(first / np.log(vocab) - 1) < 0.05, (chosen, first)


def test_every_parameter_moves_in_one_step(name, contract):
    """From the initial parameters: every leaf of the head, and of the table where it is tied; padding rows stay."""
    vocab, width = 100, 8
    options = {k: v[-1] for k, v in contract.references[name].options.items()}
    graphs, states, constants = contract.initial(name, vocab, width, vocab_multiple=128, **options)
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.normal(size=(64, width)), jnp.float32)
    targets = rng.integers(0, vocab, 64).astype(np.int32)

    def loss(states):
        head, embedding = map(nnx.merge, graphs, states, constants)
        out = head.loss(h, targets, embedding=embedding)
        return out.objective / out.weight

    @jax.jit
    def step(states):
        value, gradient = jax.value_and_grad(loss)(states)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, states, gradient)

    first, after = step(states)
    head, _ = map(nnx.merge, graphs, states, constants)
    named = contract.token_rows(name, head, states, 128)
    leaves = zip(named, jax.tree.leaves(states), jax.tree.leaves(after), strict=True)
    own = len(jax.tree.leaves(states[0]))
    for number, ((path, ids), before, moved) in enumerate(leaves):
        if number >= own and (head.ties_to == "nothing" or ids is None):
            continue  # the input side of an embedding moves by the look-up, which is not here
        before, moved = np.asarray(before), np.asarray(moved)
        assert np.any(before != moved), f"{path} does not move"
        if ids is not None:
            np.testing.assert_array_equal(before[len(ids) :], moved[len(ids) :], path)
            same = np.all((before == moved)[: len(ids)].reshape(len(ids), -1), axis=1)
            assert not same.any(), f"rows {np.flatnonzero(same)} of {path} do not move"
    assert step(after)[0] < first


@pytest.mark.parametrize("what", ["loss", "nll", "top_k", "entropy"])
def test_no_array_of_all_log_probabilities_is_held(name, what, contract):
    """2¹² tokens by 2¹⁷ rows: nothing in the traced program, gradients included, comes near their product."""
    tokens, vocab, width = 1 << 12, (1 << 17) - 5, 8
    options = {k: v[-1] for k, v in contract.references[name].options.items()}

    modules = nnx.eval_shape(
        lambda: contract.modules(name, vocab, width, vocab_multiple=128, **options)
    )
    graphs, states, constants = contract.split(modules)
    h = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def compute(states, h, constants, targets):
        head, embedding = map(nnx.merge, graphs, states, constants)
        if what == "loss":
            return head.loss(h, targets, embedding=embedding, z_loss_weight=0.1).objective
        if what == "nll":
            return jnp.sum(head.nll(h, targets, embedding=embedding))
        if what == "top_k":
            return jnp.sum(head.top_k(h, 5, embedding=embedding)[0])
        return jnp.sum(head.entropy(h, embedding=embedding))

    function = compute if what == "top_k" else jax.grad(compute, argnums=(0, 1))
    largest = largest_array(function, states, h, constants, targets)
    assert largest <= tokens * vocab / 16, f"an array of {largest} elements is held"


# --- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [("vocab_size", 1), ("vocab_size", -5), ("d_model", 0), ("vocab_multiple", 0)],
)
def test_impossible_sizes_are_refused_by_value(name, option, value):
    sizes = dict(vocab_size=11, d_model=6, rngs=nnx.Rngs(0), token_counts=np.ones(11)) | {
        option: value
    }
    with pytest.raises(ValueError, match=rf"{option} is {value}; "):
        heads.build(name, **sizes)


def test_an_unknown_option_is_refused_with_the_nearest(name):
    for option in heads.options(name):
        with pytest.raises(UsageError, match=rf"no option '{option}x'.*Did you mean '{option}'"):
            heads.build(name, vocab_size=11, d_model=6, rngs=nnx.Rngs(0), **{option + "x": 1})


def test_an_unknown_head_is_refused_with_the_nearest(name):
    with pytest.raises(UsageError, match=rf"'{name}x'.*Did you mean"):
        heads.get(name + "x")


def test_mismatched_shapes_are_refused_naming_both(name, make, contract):
    problem = make(contract.loaded_case(name))
    h, targets = jnp.zeros((3, 5, 6)), jnp.zeros((3, 5), jnp.int32)

    def call(method, h, *args, **keywords):
        return problem.call(method, problem.params, h, *args, **keywords)

    for method in ("nll", "loss"):
        with pytest.raises(ValueError, match=r"\(3, 5, 6\).*\(3, 4\)"):
            call(method, h, targets[:, :4])
        with pytest.raises(ValueError, match=r"\(3, 5, 4\).*6"):
            call(method, h[..., :4], targets)
        with pytest.raises(ValueError, match=r"bool\(3, 4\).*\(3, 5\)"):
            call(method, h, targets, where=jnp.ones((3, 4), bool))
        with pytest.raises(ValueError, match="int32.*bool"):
            call(method, h, targets, where=jnp.ones((3, 5), jnp.int32))
        with pytest.raises(TypeError, match="float32.*integer"):
            call(method, h, targets.astype(np.float32))
    for method, *args in (("log_probs",), ("top_k", 3), ("entropy",)):
        with pytest.raises(ValueError, match=r"\(3, 5, 4\).*6"):
            call(method, h[..., :4], *args)
    with pytest.raises(ValueError, match=r"\(3, 5, 4\).*6"):
        call("log_probs", h[..., :4], dtype=np.float64)


@pytest.mark.parametrize(
    ("option", "value"),
    [("label_smoothing", 1.0), ("label_smoothing", -0.1), ("z_loss_weight", -1e-4)],
)
def test_impossible_weights_of_the_objective_are_refused_by_value(
    name, option, value, make, contract
):
    problem = make(contract.loaded_case(name))
    with pytest.raises(ValueError, match=f"{option} is {value}; it must be"):
        problem.call("loss", problem.params, problem.h, problem.targets, **{option: value})


def test_states_must_be_floating(name, make, contract):
    problem = make(contract.loaded_case(name))
    with pytest.raises(TypeError, match="int32.*floating"):
        problem.call("nll", problem.params, problem.h.astype(jnp.int32), problem.targets)
