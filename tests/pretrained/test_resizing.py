"""Another vocabulary: old rows keep their bits, new ones follow the rule, padding gets nothing."""

import jax
import numpy as np
import pytest

from headlab import models
from headlab.errors import UsageError
from headlab.pretrained import OpenModel, resize_vocabulary

MORE, OLD = 390, 259  # padded to 512 and 384 rows


@pytest.fixture(scope="module", params=["tied", "untied"])
def opened(request, decoder, byte_tokenizer):
    config, model = decoder(request.param, head_bias=True)
    return OpenModel(model, byte_tokenizer, config)


def rows_of(opened):
    """(arrays with a row a token, the rest of the parameters)."""
    params = models.split(opened.model)[1]
    head = params.pop("head")
    return {"table": params.pop("embedding")["weight"], **head}, params


@pytest.mark.parametrize("rule", ["initial", "mean"])
def test_more_tokens_keep_the_rows_of_the_old_ones_to_the_bit(opened, rule):
    wide = resize_vocabulary(opened, MORE, new_rows=rule)
    before, body = rows_of(opened)
    after, same = rows_of(wide)
    jax.tree.map(np.testing.assert_array_equal, body, same)
    fresh, _ = rows_of(opened._replace(model=models.build(wide.config, MORE)))
    assert before.keys() == after.keys() and "bias" in before
    for name, rows in after.items():
        old = np.asarray(before[name])[:OLD]
        np.testing.assert_array_equal(rows[:OLD], old)
        assert len(rows) == 512 and not np.any(rows[MORE:])
        if rule == "initial":
            np.testing.assert_array_equal(rows[OLD:MORE], fresh[name][OLD:MORE])
        else:
            mean = np.broadcast_to(old.mean(axis=0, dtype=np.float64), rows[OLD:MORE].shape)
            np.testing.assert_allclose(rows[OLD:MORE], mean, rtol=2**-23, atol=0)
    assert wide.config.data.vocab_size == MORE == wide.model.head.vocab_size
    assert wide.config.model == opened.config.model


def test_there_and_back_is_the_same_model(opened):
    again = resize_vocabulary(resize_vocabulary(opened, MORE), OLD)
    one, other = models.split(opened.model), models.split(again.model)
    assert one[0] == other[0]
    arrays, same = rows_of(opened)
    arrays["bias"] = np.where(np.arange(384) < OLD, arrays["bias"], 0)  # the test's noise
    jax.tree.map(np.testing.assert_array_equal, (arrays, same), rows_of(again))


def test_the_resized_model_normalises_over_its_tokens(opened):
    wide = resize_vocabulary(opened, MORE, new_rows="mean").model
    log_probs = wide.head.log_probs(wide(np.arange(12)[None]), embedding=wide.embedding)
    assert log_probs.shape == (1, 12, MORE)
    np.testing.assert_allclose(np.exp(log_probs).sum(-1), 1, atol=1e-5)


def test_what_cannot_be_is_refused(opened, decoder, byte_tokenizer):
    with pytest.raises(UsageError, match="vocab_size is 258; .* at least the 259 ids"):
        resize_vocabulary(opened, 258)
    with pytest.raises(UsageError, match="new_rows is 'zero'; it must be 'initial' or 'mean'"):
        resize_vocabulary(opened, MORE, new_rows="zero")
    config, model = decoder("low_rank", head_rank=4)
    with pytest.raises(UsageError, match="the head 'low_rank' can't be resized"):
        resize_vocabulary(OpenModel(model, byte_tokenizer, config), MORE)
