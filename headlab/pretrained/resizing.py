"""A model over more or fewer tokens: old rows keep their bits."""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from headlab import config as configs
from headlab import models
from headlab.data import Tokenizer
from headlab.embeddings import padded_size
from headlab.errors import UsageError
from headlab.heads.linear import Tied, Untied
from headlab.pretrained.reading import OpenModel

_ROWS = (("embedding", "weight"), ("head", "weight"), ("head", "bias"))


def resize_vocabulary(
    opened: OpenModel,
    vocab_size: int,
    *,
    tokenizer: Tokenizer | None = None,
    new_rows: Literal["initial", "mean"] = "initial",
) -> OpenModel:
    """The model over `vocab_size` tokens: ids 0 … keep their rows of embedding and head to the bit, and the body too.

    New rows are drawn as those of a new model of this config and seed ("initial": normal with standard deviation
    init_scale / √d_model, biases 0), or all are the mean of the old rows ("mean", in float64, biases too), which gives
    new tokens about the probability of a mean old one (Hewitt 2021, "Initializing New Word Embeddings for Pretrained
    Language Models"). Rows are padded anew to a multiple of head.vocab_multiple: padding is zero, and was no token.
    Fewer tokens: the last rows are left out, and log-probabilities normalise over the rest.

    Args:
      opened: as `open_model` gives it; a tied or untied linear head.
      tokenizer: of the new model; None is the old one.

    Raises:
      UsageError: the head is another, the tokenizer has more ids than `vocab_size`, which must be at least 2, or
        `new_rows` is neither.
    """
    model, config = opened.model, opened.config
    tokenizer = opened.tokenizer if tokenizer is None else tokenizer
    if not isinstance(model.head, Tied | Untied):
        raise UsageError(
            f"the vocabulary of the head {config.head.name!r} can't be resized: only that of tied and untied"
        )
    if new_rows not in ("initial", "mean"):
        raise UsageError(f"new_rows is {new_rows!r}; it must be 'initial' or 'mean'")
    if vocab_size < max(2, tokenizer.vocab_size):
        raise UsageError(
            f"vocab_size is {vocab_size}; it must be at least 2, and at least the {tokenizer.vocab_size} ids of the "
            "tokenizer: give a tokenizer with fewer"
        )
    old_size, kept = model.head.vocab_size, min(model.head.vocab_size, vocab_size)
    config = configs.replace(config, {"data.vocab_size": vocab_size})
    graph, new, constants = models.split(models.build(config, vocab_size))
    params: dict[str, Any] = models.split(model)[1]
    rows = padded_size(vocab_size, config.head.vocab_multiple)
    for owner, leaf in _ROWS:
        if leaf not in params.get(owner, {}):
            continue
        old, drawn = np.asarray(params[owner][leaf])[:old_size], np.asarray(new[owner][leaf])
        wide = np.zeros((rows, *old.shape[1:]), old.dtype)
        wide[:kept] = old[:kept]
        if vocab_size > kept:
            mean = old.astype(np.float64).mean(axis=0).astype(old.dtype)
            wide[kept:vocab_size] = mean if new_rows == "mean" else drawn[kept:vocab_size]
        params[owner][leaf] = jnp.asarray(wide)
    return OpenModel(models.merge(graph, params, constants), tokenizer, config)
