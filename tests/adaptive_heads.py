"""A small adaptive head, its embedding and states for it."""

import jax.numpy as jnp
import numpy as np
from drawn import drawn
from flax import nnx

from headlab.embeddings.adaptive import Adaptive as AdaptiveEmbedding
from headlab.heads.adaptive import Adaptive

VOCAB, WIDTH = 11, 6
COUNTS = np.random.default_rng(5).permutation(VOCAB)


def build(vocab=VOCAB, width=WIDTH, **changed):
    given = dict(cutoffs=(4, 8), div_value=2.0, vocab_multiple=8, token_counts=COUNTS)
    return Adaptive(vocab_size=vocab, d_model=width, rngs=nnx.Rngs(0), **(given | changed))


def embedding_of(head, **changed):
    given = dict(cutoffs=head.cutoffs, div_value=2.0, vocab_multiple=8, token_counts=COUNTS)
    return AdaptiveEmbedding(head.vocab_size, head.d_model, rngs=nnx.Rngs(1), **(given | changed))


def states(n, width=WIDTH, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(n, width)), jnp.float32)


def perturbed(build):
    """The module with parameters that are far from their initial ones, padding rows too."""
    rng = np.random.default_rng(7)
    return drawn(build, lambda shape: 0.7 * rng.normal(size=shape))
