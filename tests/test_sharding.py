"""The mesh and the table that says where each parameter lives."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from headlab import config as configs
from headlab import heads, models, sharding
from headlab.errors import UsageError
from headlab.sharding import BY_ROWS, REPLICATED

V = 300
TINY = {"data.vocab_size": str(V), "head.vocab_multiple": "64", "model.d_model": "16"}


def model_of(head, **overrides):
    chosen = {**TINY, "head.name": head, **overrides}
    config = configs.load("configs/tiny.py", list(chosen.items()))
    return models.build(config, V, token_counts=np.arange(V, 0, -1), shards=8)


@pytest.mark.parametrize(
    ("asked", "devices", "shape"),
    [((1, 1), 8, (1, 1)), ((2, 4), 8, (2, 4)), ((-1, 2), 8, (4, 2)), ((2, -1), 8, (2, 4))],
)
def test_minus_one_stands_for_the_rest_of_the_devices(asked, devices, shape):
    assert sharding.mesh_shape(*asked, devices) == shape


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ((4, 4), ["mesh.data=4 by mesh.vocab=4", "8 devices", "needs 16", "mesh.data=2"]),
        ((-1, 3), ["mesh.vocab=3", "3 does not divide", "mesh.data=8 and mesh.vocab=1"]),
        ((-1, -1), ["one of the two must be a number"]),
        ((0, 2), ["at least 1"]),
        ((64, 1), ["64", "8 devices", "xla_force_host_platform_device_count"]),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_the_numbers_and_one_that_does(asked, words):
    with pytest.raises(UsageError) as e:
        sharding.make_mesh(*asked)
    assert all(word in str(e.value) for word in words), e.value


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"mesh.data": "0"}, ["mesh.data=0", "at least 1"]),
        ({"mesh.vocab": "-1", "mesh.data": "-1"}, ["both stand for the rest"]),
        ({"head.sum_order": "invariant", "mesh.data": "2"}, ["mesh.data=2", "mesh.data=1"]),
        ({"head.sum_order": "invariant", "mesh.fsdp": "true"}, ["mesh.fsdp=True"]),
        ({"head.sum_order": "invariant", "head.sum_blocks": "6"}, ["6", "power of two", "=4"]),
        (
            {"head.sum_order": "invariant", "head.vocab_multiple": "12"},
            ["head.sum_blocks=8", "head.vocab_multiple=12", "vocab_multiple=16"],
        ),
        (
            {"head.sum_order": "invariant", "mesh.vocab": "3"},
            ["head.sum_blocks=8", "mesh.vocab=3", "mesh.vocab=2"],
        ),
    ],
)
def test_a_mesh_that_the_order_of_sums_does_not_allow_is_refused(overrides, words):
    with pytest.raises(UsageError) as e:
        configs.load("configs/tiny.py", list(overrides.items()))
    assert all(word in str(e.value) for word in words), e.value


def test_what_minus_one_gives_is_checked_too():
    given = [("mesh.vocab", "-1"), ("head.sum_order", "invariant"), ("head.sum_blocks", "4")]
    config = configs.load("configs/tiny.py", given)
    configs.check_mesh(config, {"data": 1, "vocab": 4})
    with pytest.raises(UsageError, match=r"head\.sum_blocks=4 .* mesh\.vocab=8"):
        configs.check_mesh(config, {"data": 1, "vocab": 8})
    config = configs.load("configs/tiny.py", [("mesh.data", "-1"), ("train.batch_size", "4")])
    with pytest.raises(UsageError, match=r"train\.batch_size=4 .* mesh\.data=8"):
        configs.check_mesh(config, {"data": 8, "vocab": 1})


@pytest.mark.parametrize("name", heads.names())
@pytest.mark.parametrize("tied", [False, True])
def test_every_array_of_rows_is_sharded_and_nothing_else(name, tied):
    """Rows are known by their padding: as many as 300 tokens, or a part of them, fill up to a multiple of 64."""
    options = heads.options(name)
    if tied and "tied" not in options:
        tied = False
    changed = {"head.tied": "true"} if tied else {}
    changed |= {"head.bias": "true"} if "bias" in options else {}
    changed |= {"head.head_bias": "true"} if "head_bias" in options else {}
    if "cutoffs" in options:
        changed |= {"head.cutoffs": "(40,130)", "head.div_value": "2.0"}
    _, params, _ = models.split(model_of(name, **changed))
    specs = sharding.param_specs(params)
    for (path, leaf), spec in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(specs), strict=True
    ):
        where = jax.tree_util.keystr(path, simple=True, separator="/")
        rows = path[0].key in ("embedding", "head") and leaf.shape[0] % 64 == 0
        kernel = where.endswith("kernel") or "/latent/" in where
        assert spec == (BY_ROWS if rows and not kernel else REPLICATED), (where, leaf.shape)


def test_fsdp_shards_the_longest_axis_of_the_body_that_the_devices_divide():
    _, params, _ = models.split(model_of("untied"))
    mesh = sharding.make_mesh(4, 2)
    specs = sharding.param_specs(params, mesh, fsdp=True)
    block = specs["blocks"][0]
    assert block["mlp"]["up"]["kernel"] == jax.P(None, "data")  # [16, 64]
    assert block["mlp"]["down"]["kernel"] == jax.P("data")  # [64, 16]
    assert block["mlp_norm"]["gain"] == jax.P("data")
    assert specs["positions"] == REPLICATED and specs["head"]["weight"] == BY_ROWS
    odd = sharding.param_specs({"blocks": {"0": jnp.zeros((3, 5))}}, mesh, fsdp=True)
    assert odd["blocks"]["0"] == REPLICATED


def test_the_optimizers_state_lives_where_its_parameter_does():
    _, params, _ = models.split(model_of("untied"))
    optimizer = optax.adam(1e-3)
    specs = sharding.param_specs(params)
    found = sharding.optimizer_specs(optimizer, optimizer.init(params), specs)
    assert found[0].mu["head"]["weight"] == found[0].nu["embedding"]["weight"] == BY_ROWS
    assert found[0].mu["blocks"][0]["mlp"]["up"]["kernel"] == REPLICATED
    assert found[0].count == REPLICATED


def test_parameters_are_counted_without_the_padding_of_any_mesh():
    config = configs.load("configs/tiny.py", [*TINY.items(), ("head.name", "untied")])
    few, many = (models.build(config, V, shards=n) for n in (1, 7))
    assert many.embedding.weight.shape[0] == 448 and few.embedding.weight.shape[0] == 320
    assert models.count_parameters(few) == models.count_parameters(many)
