"""What a configuration costs and can express, from its shapes alone: nothing is trained or even initialised."""

from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from headlab import costs
from headlab.models.cost import zipf_counts
from headlab.models.decoder import build


class Budget(NamedTuple):
    """The cost of training a model, and the theorem's bound on what its head can express."""

    training_flops_per_token: float
    rank_bound: int | None  # of the log-probabilities; None: nothing below V is promised


def body_flops_per_token(config: ConfigDict) -> float:
    """Forward operations a token of the blocks of a resolved config, over sequences of data.seq_len tokens."""
    model = config.model
    return costs.body_flops_per_token(
        d_model=model.d_model,
        n_layers=model.n_layers,
        n_heads=model.n_heads,
        n_kv_heads=model.n_kv_heads,
        d_mlp=model.d_mlp,
        gated=model.activation == "swiglu",
        length=config.data.seq_len,
    )


def budget(config: ConfigDict, vocab_size: int) -> Budget:
    """The budget of a resolved config over `vocab_size` real tokens.

    The products of body and head are counted three times a token: forward, and for both gradients. A head whose cost
    depends on how frequent tokens are is given `zipf_counts`, for the configuration doesn't say.

    Raises UsageError where the head refuses an option.
    """
    found: list[Budget] = []

    def look() -> None:
        counts = zipf_counts(vocab_size)
        head = build(config, vocab_size, token_counts=counts).head
        flops = costs.passes("training") * body_flops_per_token(config)
        flops += head.cost("training", token_counts=counts).flops_per_token
        found.append(Budget(flops, head.rank_bound()))

    jax.eval_shape(look)
    return found[0]
