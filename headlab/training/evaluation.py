"""Held-out loss, exact to the token: every target of a split counted once, summed in float64, divided once."""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Int

from headlab import processes, sharding
from headlab.data import Batch, EvalBatches, TokenStore
from headlab.training.step import nll_step

N_BANDS = 10


def frequency_bands(counts: Int[np.ndarray, "vocab"]) -> Int[np.ndarray, "vocab"]:
    """The band 0 … 9 of each id: deciles of the vocabulary by training count, 0 the most frequent tenth of the ids.

    Ids of equal count are ordered by id.

    >>> frequency_bands(np.array([5, 9, 1, 0, 7, 8, 2, 6, 3, 4])).tolist()
    [4, 0, 8, 9, 2, 1, 7, 3, 6, 5]
    """
    order = np.argsort(-counts, kind="stable")
    bands = np.empty(len(counts), np.int64)
    bands[order] = np.arange(len(counts)) * N_BANDS // len(counts)
    return bands


class Evaluator:
    """Evaluates parameters of one model graph on the splits of one store; compiles once."""

    def __init__(
        self,
        graph: Any,
        store: TokenStore,
        mesh: Mesh,
        specs: Any,
        *,
        seq_len: int,
        batch_size: int,
    ):
        """`specs` says where the model's parameters live on the mesh."""
        self._store, self._seq_len, self._batch_size = store, seq_len, batch_size
        self._bands = frequency_bands(store.counts)
        # Every process reads all values: each sums them itself, in the same order.
        everywhere = NamedSharding(mesh, sharding.REPLICATED) if processes.many() else None
        self._nll = jax.jit(nll_step(graph, mesh, specs), out_shardings=everywhere)
        self._mesh = mesh

    def __call__(self, variables: tuple[Any, Any], split: str) -> dict[str, Any]:
        """Held-out loss of a split, pure cross-entropy whatever the training options.

        Args:
          variables: the model's parameters and constants.
          split: "train", "validation" or "test".

        Returns:
          loss: Σ nats ÷ Σ tokens. bits_per_byte: Σ nats ÷ ln 2 ÷ Σ UTF-8 bytes of the raw text; the separator after
          each document is predicted and counted too, and has no bytes. tokens, bytes: the two divisors.
          bands, band_tokens: loss and number of tokens by frequency band of the target; None where there is no token.
        """
        nats = np.zeros(N_BANDS)
        tokens = np.zeros(N_BANDS, np.int64)
        for batch in EvalBatches(self._store.tokens(split), self._seq_len, self._batch_size):
            arrays = self._on_devices(batch)
            nll = np.asarray(self._nll(variables, arrays), np.float64)
            band = self._bands[batch.targets[batch.where]]
            nats += np.bincount(band, nll[batch.where], minlength=N_BANDS)
            tokens += np.bincount(band, minlength=N_BANDS)
        total, count, size = float(nats.sum()), int(tokens.sum()), self._store.n_bytes(split)
        return {
            "loss": total / count,
            "bits_per_byte": total / math.log(2) / size,
            "tokens": count,
            "bytes": size,
            "bands": [float(n / t) if t else None for n, t in zip(nats, tokens, strict=True)],
            "band_tokens": tokens.tolist(),
        }

    def _on_devices(self, batch: Batch) -> tuple[Any, ...]:
        def read(rows: slice) -> tuple[np.ndarray, ...]:
            return tuple(array[rows] for array in batch)

        return processes.spread(read, self._batch_size, self._mesh, sharding.BY_BATCH)
