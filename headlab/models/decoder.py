"""The small decoder: pre-norm blocks between one embedding and one head, both of which it owns.

It returns hidden states; the head owns the loss and is handed the embedding, so that a tied table has one owner.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from headlab import config as configs
from headlab import heads
from headlab.embeddings import Constant
from headlab.errors import UsageError
from headlab.models.layers import Block, Cache, Norm, dropout


class Decoder(nnx.Module):
    """A causal language model of `config` over `vocab_size` real tokens."""

    def __init__(
        self,
        config,
        vocab_size: int,
        *,
        rngs: nnx.Rngs,
        head_name: str,
        head_options: dict,
        shards: int = 1,
    ):
        model = config.model
        self.max_length = model.max_length
        self.dtype = jnp.dtype(config.train.compute_dtype)
        self.rate = model.dropout
        self.remat = model.remat
        multiple = math.lcm(config.head.vocab_multiple, shards)
        self.embedding = heads.get(head_name).input_embedding(
            vocab_size=vocab_size,
            d_model=model.d_model,
            rngs=rngs,
            vocab_multiple=multiple,
            init_scale=config.groups.embedding.init_scale,
            **head_options,
        )
        scale = config.groups.embedding.init_scale / model.d_model**0.5
        shape = (model.max_length, model.d_model)
        learned = model.position == "learned"
        self.positions = (
            nnx.Param(jax.random.normal(rngs.params(), shape) * scale) if learned else None
        )
        self.blocks = nnx.List(
            [
                Block(model, rngs=rngs, scale=config.groups.body.init_scale)
                for _ in range(model.n_layers)
            ]
        )
        self.final_norm = Norm(model)
        self.head = heads.build(
            head_name,
            vocab_size=vocab_size,
            d_model=model.d_model,
            rngs=rngs,
            vocab_multiple=multiple,
            init_scale=config.groups.head.init_scale,
            sum_blocks=config.head.sum_blocks if config.head.sum_order == "invariant" else None,
            **head_options,
        )

    def __call__(
        self, tokens: Int[Array, "batch length"], *, dropout_key: Array | None = None
    ) -> Float[Array, "batch length d_model"]:
        """Final hidden states in the compute dtype; a position depends on its own and earlier tokens only.

        Without a `dropout_key` there is no dropout. Raises ValueError for a sequence longer than `max_length`.
        """
        length = tokens.shape[1]
        if length > self.max_length:
            raise ValueError(
                f"a sequence of {length} tokens is longer than model.max_length={self.max_length}"
            )
        n_keys = len(self.blocks) + 1
        keys = [None] * n_keys if dropout_key is None else jax.random.split(dropout_key, n_keys)
        x = self.embedding(tokens, self.dtype)
        if self.positions is not None:
            x = x + self.positions[:length].astype(self.dtype)
        x = dropout(x, self.rate, keys[0])
        for block, key in zip(self.blocks, keys[1:], strict=True):
            x = _rematerialised(block, x, key) if self.remat else block(x, key)
        return self.final_norm(x)

    def empty_cache(self, batch: int, slots: int) -> list[Cache]:
        """Room for the keys and values of positions 0 … slots−1; ValueError for more than `max_length`."""
        if slots > self.max_length:
            raise ValueError(
                f"a cache of {slots} positions is longer than model.max_length={self.max_length}"
            )
        return [block.attention.empty_cache(batch, slots, self.dtype) for block in self.blocks]

    def cached(
        self,
        tokens: Int[Array, "batch length"],
        cache: list[Cache],
        positions: Int[Array, "batch length"],
    ) -> tuple[Float[Array, "batch length d_model"], list[Cache]]:
        """(final hidden states of `tokens`, the cache with their keys and values), given what the cache holds.

        A token sees itself and the cached positions before its own. The states are those of `__call__` on the whole
        sequence, but for rounding. Rows may be at different positions, each below the cache's slots.
        """
        x = self.embedding(tokens, self.dtype)
        if self.positions is not None:
            x = x + self.positions[...][positions].astype(self.dtype)
        filled = []
        for block, own in zip(self.blocks, cache, strict=True):
            x, own = block.cached(x, own, positions)
            filled.append(own)
        return self.final_norm(x), filled


def _rematerialised(block: Block, x: Array, key: Array | None) -> Array:
    """The block, with its activations made again in the backward pass."""
    graph, state = nnx.split(block)
    return jax.checkpoint(lambda state, x, key: nnx.merge(graph, state)(x, key))(state, x, key)


def build(
    config,
    vocab_size: int,
    *,
    token_counts: np.ndarray | None = None,
    head_name: str | None = None,
    shards: int = 1,
) -> Decoder:
    """The decoder of a resolved config, initialised from `config.seed`.

    `head_name` overrides the config's head (the second phase of late untying is the same config with "untied").
    Random numbers are drawn in the order embedding, positions, blocks, head: models that differ in the head alone start
    with the same body, and with the same embedding where it is of the same kind. Rows of the vocabulary are padded to a
    multiple of `head.vocab_multiple` and of `shards`.

    Raises UsageError where the head refuses an option.
    """
    name = head_name or config.head.name
    options = _head_options(config, name)
    try:
        return Decoder(
            config,
            vocab_size,
            rngs=nnx.Rngs(config.seed),
            head_name=name,
            head_options={**options, "token_counts": token_counts},
            shards=shards,
        )
    except ValueError as problem:
        given = ", ".join(f"head.{key}={value}" for key, value in options.items())
        raise UsageError(
            f"the head {name!r} over {vocab_size} tokens with {given or 'no options'}: {problem}"
        ) from problem


def resolve_head(config, vocab_size: int, token_counts: np.ndarray | None):
    """`config` with every head option that is "auto" replaced by what it means on this corpus.

    Raises UsageError where the head refuses an option.
    """
    name = config.head.name
    options = _head_options(config, name)
    try:
        resolved = heads.get(name).resolve_options(
            dict(options),
            vocab_size=vocab_size,
            d_model=config.model.d_model,
            token_counts=token_counts,
        )
    except ValueError as problem:
        raise UsageError(f"the head {name!r} over {vocab_size} tokens: {problem}") from problem
    changed = {f"head.{k}": v for k, v in resolved.items() if v != options[k]}
    return configs.replace(config, changed) if changed else config


def _head_options(config, name: str) -> dict:
    return {key: config.head[key] for key in heads.options(name) if key in config.head}


def split(model: nnx.Module) -> tuple[nnx.GraphDef, dict, dict]:
    """(graph, parameters, constants) of a model, the last two as nested dicts; only parameters are trained."""
    graph, *states = nnx.split(model, nnx.Param, Constant)
    params, constants = states
    return graph, nnx.to_pure_dict(params), nnx.to_pure_dict(constants)


def merge(graph: nnx.GraphDef, params: dict, constants: dict) -> Decoder:
    """The model that `split` took apart, with these arrays."""
    return nnx.merge(graph, nnx.State(params), nnx.State(constants))


def count_parameters(model: Decoder) -> dict[str, int]:
    """Parameters by part, without padding rows: "embedding" (positions too), "head", "body" and their "total".

    A tied table is counted once, with the embedding.

    >>> from headlab.config import default_config, resolve
    >>> config = default_config()
    >>> config.model.update(d_model=8, n_layers=1, n_heads=2, d_mlp=16, max_length=12)
    >>> config.data.seq_len = 12
    >>> count_parameters(build(resolve(config), 11))  # (11 + 12)·8; 4·8² + 2·8·16 + three norms of 8
    {'embedding': 184, 'head': 0, 'body': 536, 'total': 720}
    """
    positions = 0 if model.positions is None else model.positions[...].size
    leaves = jax.tree_util.tree_leaves_with_path(split(model)[1])
    parts = {
        "embedding": model.embedding.parameter_count() + positions,
        "head": model.head.cost("training").parameters,
        "body": sum(
            leaf.size
            for path, leaf in leaves
            if path[0].key not in ("embedding", "positions", "head")
        ),
    }
    return {**parts, "total": sum(parts.values())}
