"""Causal attention whose softmax has an explicit gradient.

The automatic gradient of `jax.nn.softmax` is re-associated by XLA differently on one and on many partitions; the
formula `dx = y · (g − Σ y·g)`, written out, rounds the same way everywhere.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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
    length = query.shape[1]
    return _attention(query, key, value, jnp.tril(jnp.ones((length, length), dtype=bool)))


def cached_attention(
    query: Float[Array, "batch length n_heads width"],
    key: Float[Array, "batch slots n_kv_heads width"],
    value: Float[Array, "batch slots n_kv_heads width"],
    positions: Int[Array, "batch length"],
) -> Float[Array, "batch length n_heads width"]:
    """`causal_attention` of queries at `positions` over keys and values by position: slot s is position s.

    A query attends to slots 0 … its position only: what stands in later ones, which may not be written yet, is not
    seen, if it is finite.
    """
    seen = jnp.arange(key.shape[1]) <= positions[..., None]
    return _attention(query, key, value, seen[:, None, None])


def _attention(query, key, value, seen):
    """`seen`, broadcast to [batch, n_kv_heads, group, length, slots], says which slots each query attends to."""
    batch, length, n_heads, width = query.shape
    n_kv_heads = key.shape[2]
    accumulate = jnp.promote_types(query.dtype, jnp.float32)
    grouped = (query * width**-0.5).reshape(batch, length, n_kv_heads, n_heads // n_kv_heads, width)
    scores = jnp.einsum("btkgw,bskw->bkgts", grouped, key, preferred_element_type=accumulate)
    # The lowest finite number, not −inf: its gradient is 0 and never NaN. Each row keeps its own position at least.
    weights = softmax(jnp.where(seen, scores, jnp.finfo(accumulate).min))
    mixed = jnp.einsum(
        "bkgts,bskw->btkgw", weights.astype(value.dtype), value, preferred_element_type=accumulate
    )
    return mixed.astype(query.dtype).reshape(batch, length, n_heads, width)
