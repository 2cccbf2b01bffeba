"""Small models, tokenizers and runs that the tests of scoring share."""

import dataclasses
import functools

import pytest

from headlab import models
from headlab.config import default_config, resolve

VOCABULARY = 11  # padded to 16: ids 11 to 15 must never come up
MAX_LENGTH = 12


@dataclasses.dataclass(frozen=True)
class Sizes:
    vocabulary: int = VOCABULARY
    max_length: int = MAX_LENGTH


@functools.lru_cache(maxsize=16)
def _built(head, position, seed, kv_heads, options, vocabulary, max_length):
    config = default_config()
    config.seed = seed
    config.model.update(
        d_model=8,
        n_layers=2,
        n_heads=4,
        n_kv_heads=kv_heads,
        max_length=max_length,
        position=position,
    )
    config.data.seq_len = max_length
    config.head.name = head
    config.head.vocab_multiple = 16
    if head == "adaptive":
        config.head.cutoffs = (4,)
    for key, value in options:
        config.head[key] = value
    # far from uniform, so that the choice of a token is not a matter of rounding
    config.groups.embedding.init_scale = config.groups.head.init_scale = 8.0
    config = resolve(config)
    return config, models.build(config, vocabulary)


@pytest.fixture(scope="session")
def sizes():
    return Sizes()


@pytest.fixture(scope="session")
def make_model():
    """make_model(head, position=…, seed=…, kv_heads=…, vocabulary=…, max_length=…) → (config, model); kept."""

    def make(head="tied", position="learned", *, seed=0, kv_heads=2, vocabulary=VOCABULARY,
             max_length=MAX_LENGTH, **options):  # fmt: skip
        given = tuple(options.items())
        return _built(head, position, seed, kv_heads, given, vocabulary, max_length)

    return make
