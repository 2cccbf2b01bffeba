"""What a configuration costs and can express, from its shapes alone: nothing is trained or even initialised."""

from typing import NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from headlab import config as configs
from headlab import costs
from headlab.models.cost import architecture
from headlab.models.decoder import build, count_parameters, resolve_head


class Budget(NamedTuple):
    """The size of a model, the cost of training it, and the theorem's bound on what its head can express."""

    parameters: int  # of the whole model, without padding, a tied table once
    flops: float  # operations a token of a training step: three times those of the blocks forward, and the head's
    rank_bound: int | None  # of the log-probabilities; None: nothing below V is promised


def body_flops_per_token(config: ConfigDict) -> float:
    """Forward operations a token of the blocks of a resolved config, over sequences of data.seq_len tokens."""
    model = config.model
    return costs.body_flops_per_token(
        d_model=model.d_model,
        n_layers=model.n_layers,
        n_heads=model.n_heads,
        n_kv_heads=model.n_kv_heads,
        d_head=configs.head_width(model),
        d_mlp=model.d_mlp,
        gated=model.activation == "swiglu",
        length=config.data.seq_len,
    )


def budget(config: ConfigDict, vocab_size: int, token_counts: np.ndarray | None = None) -> Budget:
    """The budget of a resolved config over `vocab_size` real tokens.

    The products of body and head are counted three times a token: forward, and for both gradients. `token_counts` are
    how often each token is met in training, which the operations of an adaptive head depend on; without them every
    token counts alike.

    Raises UsageError where the head refuses an option, and for an option that is "auto" where there are no counts.
    """
    outside = _outside(config, vocab_size, token_counts)
    parts = architecture(config, "").parameters()
    body = costs.passes("training") * body_flops_per_token(config)
    return Budget(
        outside.parameters + parts["blocks"] + parts["norm"],
        outside.flops + body,
        outside.rank_bound,
    )


def _outside(config: ConfigDict, vocab_size: int, token_counts: np.ndarray | None) -> Budget:
    """Embedding and head; one block stands for the body, which they do not depend on."""
    config = configs.replace(config, {"model.n_layers": 1, "model.d_mlp": 1})
    counted = None if token_counts is None else hash(token_counts.tobytes())
    key = repr((vocab_size, counted, config.model.to_dict(), config.head.to_dict()))
    if key in _KNOWN:
        return _KNOWN[key]
    config = resolve_head(config, vocab_size, token_counts)
    found: list[Budget] = []

    def look() -> None:
        model = build(config, vocab_size, token_counts=token_counts)
        parts = count_parameters(model)
        flops = model.head.cost("training", token_counts).flops_per_token
        found.append(Budget(parts["total"] - parts["body"], flops, model.head.rank_bound()))

    jax.eval_shape(look)
    _KNOWN[key] = found[0]
    return found[0]


_KNOWN: dict[
    str, Budget
] = {}  # what was counted in this process, for building a model takes a while
