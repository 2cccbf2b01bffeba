"""Causal attention whose softmax has an explicit gradient.

The automatic gradient of `jax.nn.softmax` is re-associated by XLA differently on one and on many partitions; the
formula `dx = y · (g − Σ y·g)`, written out, rounds the same way everywhere.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.custom_vjp
def softmax(x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
    """Softmax over the last axis, `y = exp(x − max x) / Σ exp(x − max x)`, with gradient `y · (g − Σ y·g)`."""
    e = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    return e / jnp.sum(e, axis=-1, keepdims=True)


def _softmax_forward(x: Array) -> tuple[Array, Array]:
    y = softmax(x)
    return y, y


def _softmax_backward(y: Array, g: Array) -> tuple[Array]:
    return (y * (g - jnp.sum(y * g, axis=-1, keepdims=True)),)


softmax.defvjp(_softmax_forward, _softmax_backward)


def causal_attention(
    query: Float[Array, "batch length n_heads width"],
    key: Float[Array, "batch length n_kv_heads width"],
    value: Float[Array, "batch length n_kv_heads width"],
) -> Float[Array, "batch length n_heads width"]:
    """`softmax(q·kᵀ/√width + causal mask) · v`; query head i reads key-value head i // (n_heads // n_kv_heads).

    Scores and their softmax are float32 (at least), whatever the dtype of the inputs; the result has the dtype of
    `query`. Position t attends to positions 0…t only.
    """
    batch, length, n_heads, width = query.shape
    n_kv_heads = key.shape[2]
    accumulate = jnp.promote_types(query.dtype, jnp.float32)
    grouped = (query * width**-0.5).reshape(batch, length, n_kv_heads, n_heads // n_kv_heads, width)
    scores = jnp.einsum("btkgw,bskw->bkgts", grouped, key, preferred_element_type=accumulate)
    causal = jnp.tril(jnp.ones((length, length), dtype=bool))
    # The lowest finite number, not −inf: its gradient is 0 and never NaN. Each row keeps its own position at least.
    weights = softmax(jnp.where(causal, scores, jnp.finfo(accumulate).min))
    mixed = jnp.einsum(
        "bkgts,bskw->btkgw", weights.astype(value.dtype), value, preferred_element_type=accumulate
    )
    return mixed.astype(query.dtype).reshape(batch, length, n_heads, width)
