"""The training step that one writes first: Flax and Optax as their guides show them, nothing else.

Logits of the whole batch are materialised, and all gradients are automatic.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Block(nnx.Module):
    """`x + attention(norm x)`, then `x + mlp(norm x)`."""

    def __init__(self, d: int, n_heads: int, d_mlp: int, rngs: nnx.Rngs):
        self.n_heads = n_heads
        self.attention_norm = nnx.RMSNorm(d, epsilon=1e-6, rngs=rngs)
        self.query = nnx.Linear(d, d, use_bias=False, rngs=rngs)
        self.key = nnx.Linear(d, d, use_bias=False, rngs=rngs)
        self.value = nnx.Linear(d, d, use_bias=False, rngs=rngs)
        self.output = nnx.Linear(d, d, use_bias=False, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(d, epsilon=1e-6, rngs=rngs)
        self.up = nnx.Linear(d, d_mlp, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(d_mlp, d, use_bias=False, rngs=rngs)

    def __call__(self, x):
        batch, length, d = x.shape
        normed = self.attention_norm(x)
        query, key, value = (
            project(normed).reshape(batch, length, self.n_heads, d // self.n_heads)
            for project in (self.query, self.key, self.value)
        )
        scores = jnp.einsum("bthw,bshw->bhts", query, key) / jnp.sqrt(d // self.n_heads)
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
        mixed = jnp.einsum("bhts,bshw->bthw", weights, value)
        x = x + self.output(mixed.reshape(batch, length, d))
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class Decoder(nnx.Module):
    """Token ids [batch, length] to logits [batch, length, vocab_size]."""

    def __init__(self, model: Any, vocab_size: int, *, tied: bool, rngs: nnx.Rngs):
        d = model.d_model
        self.embedding = nnx.Embed(vocab_size, d, rngs=rngs)
        self.positions = nnx.Param(jnp.zeros((model.max_length, d)))
        self.blocks = nnx.List(
            [Block(d, model.n_heads, model.d_mlp, rngs) for _ in range(model.n_layers)]
        )
        self.final_norm = nnx.RMSNorm(d, epsilon=1e-6, rngs=rngs)
        self.head = None if tied else nnx.Linear(d, vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.final_norm(x)
        return self.embedding.attend(x) if self.head is None else self.head(x)


class NaiveStep:
    """Trains the naive decoder from the given parameters, one call a batch."""

    def __init__(self, config: Any, params: Mapping[str, Any], rate: optax.Schedule):
        """`params` by headlab's paths, such as "blocks/0/mlp/up/kernel"; `rate` of step → rate."""
        model = Decoder(
            config.model,
            config.data.vocab_size,
            tied=config.head.name == "tied",
            rngs=nnx.Rngs(config.seed),
        )
        graph, state = nnx.split(model)
        self.params = nnx.State(_translated(nnx.to_pure_dict(state), params))
        o = config.optimizer
        optimizer = optax.chain(
            optax.clip_by_global_norm(o.clip_norm),
            optax.adamw(
                rate,
                b1=o.b1,
                b2=o.b2,
                eps=o.eps,
                weight_decay=config.groups.body.weight_decay,
                mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
            ),
        )
        self._opt_state = optimizer.init(self.params)

        def loss_of(params, inputs, targets):
            logits = nnx.merge(graph, params)(inputs)
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

        def step(params, opt_state, inputs, targets):
            loss, gradients = jax.value_and_grad(loss_of)(params, inputs, targets)
            updates, opt_state = optimizer.update(gradients, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        self._step = jax.jit(step, donate_argnums=(0, 1))

    def __call__(self, inputs, targets) -> jax.Array:
        """Makes one update; the loss before it, nats a token."""
        self.params, self._opt_state, loss = self._step(
            self.params, self._opt_state, inputs, targets
        )
        return loss


def _translated(tree: Any, params: Mapping[str, Any]) -> Any:
    """`tree` with headlab's values: other names, and a head's matrix the other way round."""

    def value_of(path, leaf):
        parts = [str(entry.key) for entry in path]
        if parts[0] == "head":
            return jnp.array(params["head/weight"]).T
        if parts[0] == "blocks" and parts[-1] == "kernel":
            part = "mlp" if parts[2] in ("up", "down") else "attention"
            parts.insert(2, part)
        parts[-1] = {"scale": "gain", "embedding": "weight"}.get(parts[-1], parts[-1])
        value = jnp.array(params["/".join(parts)])  # a buffer of its own, for it is donated
        assert value.shape == leaf.shape, (path, value.shape, leaf.shape)
        return value

    return jax.tree_util.tree_map_with_path(value_of, tree)
