"""The dense cross-entropy of a linear map in float64 NumPy, with its gradients written out by hand."""

from types import SimpleNamespace

import numpy as np
import pytest


def _dense(
    h, weight, bias, targets, where=None, *, vocab_size, scale=1.0, softcap=None, z=0.0, alpha=0.0
):
    """Statistics a token, sums over the counted ones, and the gradients of the objective.

    Every row of `weight` beyond `vocab_size` is ignored; its gradient is zero. Uncounted tokens are dropped before
    anything is computed.
    """
    h, weight = np.asarray(h, np.float64), np.asarray(weight, np.float64)
    tokens = h.shape[0]
    where = np.ones(tokens, bool) if where is None else np.asarray(where)
    h, targets = np.where(where[:, None], h, 0), np.where(where, targets, 0)
    rows = weight[:vocab_size]
    z_raw = h @ rows.T + (0 if bias is None else np.asarray(bias, np.float64)[:vocab_size])
    logits = scale * z_raw
    slope = np.full_like(logits, scale)
    if softcap is not None:
        tanh = np.tanh(logits / softcap)
        logits, slope = softcap * tanh, scale * (1 - tanh**2)
    largest = logits.max(axis=1) if tokens else np.zeros(0)
    shifted = logits - largest[:, None]
    log_sum = np.log(np.exp(shifted).sum(axis=1))
    p = np.exp(shifted - log_sum[:, None])
    one_hot = np.arange(vocab_size) == targets[:, None]
    nll = log_sum - (shifted * one_hot).sum(axis=1)
    uniform = log_sum - shifted.mean(axis=1)
    lse = largest + log_sum
    objective = (1 - alpha) * nll + alpha * uniform + z * lse**2

    def gradients(g_nll, g_lse, g_uniform):
        """(dh, dweight, dbias) of Σ g_nll·nll + g_lse·lse + g_uniform·uniform."""
        dt = g_nll[:, None] * (p - one_hot) + g_lse[:, None] * p
        dt = dt + g_uniform[:, None] * (p - 1 / vocab_size)
        dz = dt * slope * where[:, None]
        dweight, dbias = np.zeros_like(weight), np.zeros(len(weight))
        dweight[:vocab_size], dbias[:vocab_size] = dz.T @ h, dz.sum(axis=0)
        return dz @ rows, dweight, (None if bias is None else dbias)

    ones = np.ones(tokens)
    return SimpleNamespace(
        nll=nll,
        lse=lse,
        uniform_nll=uniform,
        probabilities=p,
        objective=(objective * where).sum(),
        nats=(nll * where).sum(),
        weight=where.sum(),
        gradients=gradients,
        gradient=gradients((1 - alpha) * ones, 2 * z * lse, alpha * ones),
    )


@pytest.fixture(scope="session")
def dense():
    """dense(h, weight, bias, targets, where, vocab_size=…, …) → statistics, sums and gradients in float64."""
    return _dense


@pytest.fixture
def draw():
    """draw(tokens, vocab_size, rows, d) → (h, weight, bias, targets, where); padding rows hold large numbers."""

    def problem(tokens, vocab_size, rows, d=4, seed=0):
        rng = np.random.default_rng(seed)
        h, weight, bias = (rng.normal(size=s) for s in ((tokens, d), (rows, d), (rows,)))
        weight[vocab_size:], bias[vocab_size:] = 40.0, 40.0
        targets = rng.integers(0, vocab_size, tokens).astype(np.int32)
        where = rng.random(tokens) < 0.7
        return h, weight, bias, targets, where

    return problem
