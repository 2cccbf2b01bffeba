"""Anisotropy, gradient shares and similarities against their definitions, written out on small matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from headlab import heads
from headlab.analysis.geometry import (
    anisotropy,
    gradient_share,
    head_gradient_share,
    output_rows,
    output_spectra,
    table_similarity,
)
from headlab.errors import UsageError
from headlab.runs import RunDirectory, restore_model


def test_anisotropy_is_the_mean_cosine_of_all_pairs():
    h = np.random.default_rng(0).standard_normal((30, 5)) + 1
    unit = h / np.linalg.norm(h, axis=1, keepdims=True)
    cosines = unit @ unit.T
    wanted = (cosines.sum() - 30) / (30 * 29)
    assert anisotropy(h) == pytest.approx(wanted, abs=1e-13)
    assert anisotropy(np.array_split(h, 4)) == pytest.approx(wanted, abs=1e-13)
    assert anisotropy(np.ones((4, 3))) == pytest.approx(1, abs=1e-14)
    with pytest.raises(UsageError, match="norm 0"):
        anisotropy(np.zeros((3, 2)))
    with pytest.raises(UsageError, match="at least 2"):
        anisotropy(np.ones((1, 2)))


def test_a_gradient_in_the_columns_passes_and_one_orthogonal_to_them_does_not():
    weight = np.zeros((6, 2))
    weight[0, 0] = weight[1, 1] = 3.0
    gradients = np.zeros((3, 6))
    gradients[0, 0], gradients[1, 5] = 2.0, 1.0  # the third is zero
    found = gradient_share(weight, gradients)
    assert found.norm == pytest.approx(0.5) and found.energy == pytest.approx(4 / 5)
    assert found.positions == 2 and found.by_chance == pytest.approx((2 / 6) ** 0.5)


def test_random_gradients_keep_about_their_share_by_chance():
    rng = np.random.default_rng(0)
    found = gradient_share(rng.standard_normal((400, 25)), rng.standard_normal((300, 400)))
    assert found.norm == pytest.approx(found.by_chance, rel=0.03)


def test_the_share_of_a_head_is_that_of_its_own_logit_gradient():
    head = heads.build("untied", vocab_size=20, d_model=4, rngs=nnx.Rngs(0), init_scale=1.0)
    rng = np.random.default_rng(0)
    h, targets = rng.standard_normal((9, 4)), rng.integers(0, 20, 9)
    weight = np.asarray(head.weight[...], np.float64)

    def loss(logits):
        return -jnp.sum(jax.nn.log_softmax(logits)[jnp.arange(9), targets])

    gradient = np.asarray(jax.grad(loss)(jnp.asarray(h @ weight.T, jnp.float32)), np.float64)
    projector = weight @ np.linalg.inv(weight.T @ weight) @ weight.T
    wanted = np.linalg.norm(gradient @ projector, axis=1) / np.linalg.norm(gradient, axis=1)
    assert head_gradient_share(head, h, targets).norm == pytest.approx(wanted.mean(), rel=1e-5)
    bent = heads.build("sigsoftmax", vocab_size=20, d_model=4, rngs=nnx.Rngs(0))
    with pytest.raises(UsageError, match="sigsoftmax adds"):
        head_gradient_share(bent, h, targets)


def test_a_rotated_table_is_alike_by_cka_and_an_equal_one_by_everything():
    rng = np.random.default_rng(0)
    table = rng.standard_normal((50, 4))
    same = table_similarity(table, 2 * table)
    np.testing.assert_allclose(same.row_cosines, 1, atol=1e-14)
    np.testing.assert_allclose(same.principal_cosines, 1, atol=1e-14)
    rotation = np.linalg.qr(rng.standard_normal((4, 4)))[0]
    turned = table_similarity(table, table @ rotation)
    assert turned.cka == pytest.approx(1, abs=1e-13) and abs(turned.row_cosines).max() < 1
    other = table_similarity(table, rng.standard_normal((50, 3)))
    assert other.cka < 0.3 and np.isnan(other.row_cosines).all()
    assert other.principal_cosines.shape == (3,)


def test_spectra_of_all_checkpoints_are_those_of_their_matrices(tiny_run):
    found = output_spectra(tiny_run)
    assert sorted(found) == [2, 4]
    for step, spectrum in found.items():
        model = restore_model(RunDirectory(tiny_run), step).model
        wanted = np.linalg.svd(np.asarray(model.head.weight[...])[:300].astype(float))[1]
        np.testing.assert_allclose(spectrum.singular_values, wanted, rtol=1e-12)
    assert not np.array_equal(found[2].singular_values, found[4].singular_values)


def test_heads_without_one_matrix_are_refused():
    adaptive = heads.build(
        "adaptive", vocab_size=200, d_model=8, rngs=nnx.Rngs(0), cutoffs=(50,), div_value=2.0
    )
    with pytest.raises(UsageError, match="no one output matrix"):
        output_rows(adaptive)
