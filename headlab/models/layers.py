"""The parts of a decoder block: normalisation, rotary positions, attention, MLP. All are free of random state."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from headlab import config as configs
from headlab.ops import cached_attention, causal_attention, linear


class Cache(NamedTuple):
    """Keys and values of one attention by position, [batch, slots, n_kv_heads, width]; keys are rotated already."""

    key: Array
    value: Array


class Norm(nnx.Module):
    """RMSNorm, `gain · x / √(mean x² + ε)` (Zhang & Sennrich 2019), or LayerNorm with the mean taken off first.

    Statistics are float32 at least; the result has the dtype of x. LayerNorm has a bias where `model.bias` says so.
    """

    def __init__(self, model):
        self.centred, self.epsilon = model.norm == "layer", model.norm_eps
        self.gain = nnx.Param(jnp.ones(model.d_model))
        biased = model.bias and self.centred
        self.bias = nnx.Param(jnp.zeros(model.d_model)) if biased else None

    def __call__(self, x: Float[Array, "... d_model"]) -> Float[Array, "... d_model"]:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if self.centred:
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        y = wide * jax.lax.rsqrt(square + self.epsilon) * self.gain[...]
        if self.bias is not None:
            y = y + self.bias[...]
        return y.astype(x.dtype)


class Projection(nnx.Module):
    """`x · kernel (+ bias)`; the kernel `[d_in, d_out]` starts normal with standard deviation `scale / √d_in`."""

    def __init__(self, d_in: int, d_out: int, *, rngs: nnx.Rngs, bias: bool, scale: float):
        self.kernel = nnx.Param(
            jax.random.normal(rngs.params(), (d_in, d_out)) * (scale / d_in**0.5)
        )
        self.bias = nnx.Param(jnp.zeros(d_out)) if bias else None

    def __call__(self, x: Float[Array, "... d_in"]) -> Float[Array, "... d_out"]:
        y = linear(x, self.kernel[...])
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


def rotate(
    x: Float[Array, "batch length heads width"],
    theta: float,
    positions: Int[Array, "batch length"] | None = None,
    scaling: tuple[float, float, float, float] | None = None,
) -> Array:
    """Rotary positions (Su et al. 2021): pair (i, i + width/2) turns by position · theta^(−2i/width), in float32.

    `positions` None is 0 … length−1; `scaling` is that of `stretched`.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is not None:
        frequency = stretched(frequency, scaling)
    places = jnp.arange(x.shape[1], dtype=jnp.float32) if positions is None else positions
    angle = places.astype(jnp.float32)[..., None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def stretched(
    frequency: Float[Array, "pairs"], scaling: tuple[float, float, float, float]
) -> Float[Array, "pairs"]:
    """Rotary frequencies for texts longer than those first trained on, as in Llama 3.1 (Grattafiori et al. 2024).

    With (factor, low, high, original length): wavelengths above length/low become `factor` times as long, those below
    length/high stay, and between the two the frequency is a mean of both by s = (length/wavelength − low)/(high − low).
    """
    factor, low, high, length = scaling
    turns = length * frequency / (2 * jnp.pi)
    s = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequency * ((1 - s) / factor + s)


class Attention(nnx.Module):
    """Causal multi-head attention, with fewer key-value heads where asked (Ainslie et al. 2023)."""

    def __init__(self, model, *, rngs: nnx.Rngs, scale: float, output_scale: float):
        self.n_heads, self.n_kv_heads = model.n_heads, model.n_kv_heads
        self.theta = model.rope_theta if model.position == "rotary" else None
        self.scaling = model.rope_scaling
        d, width, biases = model.d_model, configs.head_width(model), configs.biases(model)
        wide, narrow = self.n_heads * width, self.n_kv_heads * width
        self.query = Projection(d, wide, rngs=rngs, bias=biases.qkv, scale=scale)
        self.key = Projection(d, narrow, rngs=rngs, bias=biases.qkv, scale=scale)
        self.value = Projection(d, narrow, rngs=rngs, bias=biases.qkv, scale=scale)
        self.output = Projection(wide, d, rngs=rngs, bias=biases.output, scale=output_scale)

    def __call__(self, x: Float[Array, "batch length d_model"]) -> Array:
        query, key, value = self._projected(x, None)
        return self.output(causal_attention(query, key, value).reshape(*x.shape[:-1], -1))

    def cached(
        self, x: Float[Array, "batch length d_model"], cache: Cache, positions: Array
    ) -> tuple[Array, Cache]:
        """(the result at `positions` [batch, length], the cache with their keys and values)."""
        query, key, value = self._projected(x, positions)
        row = jnp.arange(x.shape[0])[:, None]
        cache = Cache(
            cache.key.at[row, positions].set(key), cache.value.at[row, positions].set(value)
        )
        mixed = cached_attention(query, *cache, positions)
        return self.output(mixed.reshape(*x.shape[:-1], -1)), cache

    def empty_cache(self, batch: int, slots: int, dtype) -> Cache:
        """A cache of zeros."""
        width = self.key.kernel[...].shape[1] // self.n_kv_heads
        zeros = jnp.zeros((batch, slots, self.n_kv_heads, width), dtype)
        return Cache(zeros, zeros)

    def _projected(self, x, positions):
        """Queries, keys and values, [batch, length, heads, width]; rotated where positions are."""
        batch, length, _ = x.shape
        query = self.query(x).reshape(batch, length, self.n_heads, -1)
        key = self.key(x).reshape(batch, length, self.n_kv_heads, -1)
        value = self.value(x).reshape(batch, length, self.n_kv_heads, -1)
        if self.theta is not None:
            query = rotate(query, self.theta, positions, self.scaling)
            key = rotate(key, self.theta, positions, self.scaling)
        return query, key, value


class MLP(nnx.Module):
    """`down(gelu(up x))` with the tanh form of GELU, or SwiGLU `down(silu(gate x) · up x)` (Shazeer 2020)."""

    def __init__(self, model, *, rngs: nnx.Rngs, scale: float, output_scale: float):
        d, d_mlp = model.d_model, model.d_mlp
        gated, bias = model.activation == "swiglu", configs.biases(model).mlp
        self.up = Projection(d, d_mlp, rngs=rngs, bias=bias, scale=scale)
        self.gate = Projection(d, d_mlp, rngs=rngs, bias=bias, scale=scale) if gated else None
        self.down = Projection(d_mlp, d, rngs=rngs, bias=bias, scale=output_scale)

    def __call__(self, x: Float[Array, "... d_model"]) -> Float[Array, "... d_model"]:
        up = self.up(x)
        hidden = jax.nn.gelu(up) if self.gate is None else jax.nn.silu(self.gate(x)) * up
        return self.down(hidden)


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """Zeroes each entry with probability `rate` and scales the rest by 1/(1−rate); the identity without a key."""
    if key is None or rate == 0:
        return x
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0)


class Block(nnx.Module):
    """`x + attention(norm x)`, then `x + mlp(norm x)`."""

    def __init__(self, model, *, rngs: nnx.Rngs, scale: float):
        # Each of the 2·n_layers branches adds to the residual stream; so scaled, their sum starts at the size of one.
        output_scale = scale / (2 * model.n_layers) ** 0.5
        self.rate = model.dropout
        self.attention_norm = Norm(model)
        self.attention = Attention(model, rngs=rngs, scale=scale, output_scale=output_scale)
        self.mlp_norm = Norm(model)
        self.mlp = MLP(model, rngs=rngs, scale=scale, output_scale=output_scale)

    def __call__(self, x: Float[Array, "batch length d_model"], key: Array | None) -> Array:
        first, second = (None, None) if key is None else jax.random.split(key)
        x = x + dropout(self.attention(self.attention_norm(x)), self.rate, first)
        return x + dropout(self.mlp(self.mlp_norm(x)), self.rate, second)

    def cached(self, x: Array, cache: Cache, positions: Array) -> tuple[Array, Cache]:
        """(the block's result at `positions`, the cache with their keys and values); no dropout."""
        mixed, cache = self.attention.cached(self.attention_norm(x), cache, positions)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), cache
