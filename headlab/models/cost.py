"""What the model of a config costs, with whatever head it has; nothing is trained, and no corpus is read."""

from typing import Any

import jax
import numpy as np

from headlab import config as configs
from headlab import heads
from headlab.costs import Architecture, Chip, ModelCost, Setting, model_cost
from headlab.models.decoder import build, count_parameters, resolve_head

_ITEMSIZE = 4  # of the bytes that heads count


def zipf_counts(vocab_size: int) -> np.ndarray:
    """Counts of tokens by rank r that fall as 1/(r + 2.7) (Mandelbrot 1953), most frequent first."""
    return np.round(1e9 / (np.arange(vocab_size) + 3.7)).astype(np.int64)


def architecture(config: Any, name: str) -> Architecture:
    """The decoder of a resolved config, over `data.vocab_size` tokens, as numbers."""
    model = config.model
    biases = configs.biases(model)
    return Architecture(
        name=name,
        vocab_size=config.data.vocab_size,
        d_model=model.d_model,
        n_layers=model.n_layers,
        n_heads=model.n_heads,
        n_kv_heads=model.n_kv_heads,
        d_head=configs.head_width(model),
        d_mlp=model.d_mlp,
        gated=model.activation == "swiglu",
        tied=heads.get(config.head.name).ties_to != "nothing",
        learned_positions=model.max_length if model.position == "learned" else 0,
        qkv_bias=biases.qkv,
        output_bias=biases.output,
        mlp_bias=biases.mlp,
        norm_bias=model.bias and model.norm == "layer",
    )


def config_cost(config: Any, name: str, setting: Setting, chip: Chip | None = None) -> ModelCost:
    """`model_cost` of a resolved config's model, with the cost that its own head states.

    A head whose cost depends on how frequent tokens are is given `zipf_counts`.

    Raises UsageError where the head refuses an option.
    """
    size = config.data.vocab_size
    counts = zipf_counts(size)
    config = resolve_head(config, size, counts)
    made: list[tuple[Any, dict[str, int]]] = []

    def shapes():
        model = build(config, size, token_counts=counts)
        made.append((model.head, count_parameters(model)))
        return ()

    jax.eval_shape(shapes)
    head, parts = made[0]
    costs = {
        mode: head.cost(mode, token_counts=counts) for mode in ("training", "scoring", "decoding")
    }
    scaled = {
        mode: cost._replace(bytes_read=cost.bytes_read * setting.itemsize / _ITEMSIZE)
        for mode, cost in costs.items()
    }
    return model_cost(architecture(config, name), setting, chip, head=scaled, parameters=parts)
