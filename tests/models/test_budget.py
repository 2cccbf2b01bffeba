"""Promises of a configuration's budget: it is that of the model itself, and nothing is computed for it."""

import pytest

from headlab import config as configs
from headlab import heads, models
from headlab.errors import UsageError
from headlab.models.cost import zipf_counts

SMALL = {"model.d_model": 16, "model.n_layers": 1, "model.n_heads": 2, "data.vocab_size": 300}
NEEDED = {"low_rank": {"head.rank": 4}, "adaptive": {"head.cutoffs": (100, 200)}}


def small(head: str, **values):
    given = {**SMALL, **NEEDED.get(head, {}), "head.name": head, **values}
    return configs.replace(configs.default_config(), given)


@pytest.mark.parametrize("head", heads.names())
def test_the_bound_and_the_cost_are_those_of_the_model(head):
    config = small(head)
    found = models.budget(config, 300)
    counts = zipf_counts(300)
    built = models.build(config, 300, token_counts=counts).head
    assert found.rank_bound == built.rank_bound()
    body = 3 * models.body_flops_per_token(config)
    assert (
        found.training_flops_per_token
        == body + built.cost("training", token_counts=counts).flops_per_token
    )


def test_the_cost_is_three_times_the_products_of_a_forward_pass():
    d, length, vocabulary = 16, 32, 300
    config = small("untied", **{"data.seq_len": length, "model.max_length": length})
    block = 4 * d * d + 2 * d * 4 * d  # attention's four matrices, the two of the MLP
    attended = 2 * d * (length + 1) / 2  # scores and their sum over the values, causal
    expected = 3 * 2 * (block + attended + d * vocabulary)
    assert models.budget(config, vocabulary).training_flops_per_token == expected


def test_an_option_that_a_head_refuses_is_refused():
    with pytest.raises(UsageError, match="low_rank"):
        models.budget(small("low_rank", **{"head.rank": 10_000}), 300)
