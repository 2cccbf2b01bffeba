"""Scores of text equal the whole distribution, whatever the batch, the padding, the window or the head."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_decoder
from contract_cases import heads_by_time

from headlab import models
from headlab.errors import HeadlabError, UsageError
from headlab.scoring import score
from headlab.scoring.windows import bucket, cut

TEXTS = [[3], [1, 2, 3, 4, 5], [10, 0, 7], [5] * 4, [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 10, 2]]
PREFIX = [6]
# of sums of eight products and eleven exponentials, float32: some twenty roundings of numbers below 40
CLOSE = 1e-5 * 3


def dense(model, sequences):
    """For each sequence, [len − 1, V] float64 log-probabilities of the token after each position but the last."""
    ids = np.zeros((len(sequences), model.max_length), np.int32)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence) - 1] = sequence[:-1]
    h = jax.jit(lambda model, ids: model(ids))(model, ids)
    log_probs = model.head.log_probs(h, embedding=model.embedding, dtype=np.float64)
    return [row[: len(ids) - 1] for row, ids in zip(log_probs, sequences, strict=True)]


def check(scores, expected, ids, top):
    for token, log_probs, id_ in zip(scores, expected, ids, strict=True):
        order = np.argsort(-log_probs, kind="stable")
        assert token.id == id_
        assert token.log_prob == pytest.approx(log_probs[id_], abs=CLOSE)
        assert token.rank == 1 + list(order).index(id_)
        assert token.entropy == pytest.approx(-np.sum(np.exp(log_probs) * log_probs), abs=CLOSE)
        assert [i for i, _ in token.top] == order[:top].tolist()
        np.testing.assert_allclose([p for _, p in token.top], log_probs[order[:top]], atol=CLOSE)


@pytest.mark.parametrize("head", heads_by_time())
def test_every_token_has_what_the_dense_distribution_says(head, make_model):
    _, model = make_model(head)
    found = score(model, TEXTS, top=3, prefix=PREFIX, batch_size=2)
    wanted = dense(model, [PREFIX + text for text in TEXTS])
    for text, scores, log_probs in zip(TEXTS, found, wanted, strict=True):
        check(scores, log_probs, text, 3)
        assert [token.context for token in scores] == list(range(1, len(text) + 1))


@pytest.mark.parametrize("position", ["learned", "rotary"])
def test_scores_are_those_of_the_decoder_written_in_numpy(position, make_model):
    config, model = make_model("untied", position)
    _, params, _ = models.split(model)
    [scores] = score(model, [TEXTS[1]])
    ids = np.array([TEXTS[1]])
    expected = reference_decoder.log_probs(params, config.model, ids, 11)[0]
    wanted = [expected[i, id_] for i, id_ in enumerate(TEXTS[1][1:])]
    np.testing.assert_allclose([token.log_prob for token in scores[1:]], wanted, atol=2e-4)


def test_the_log_partition_normalises_the_logits_of_linear_heads(make_model):
    _, model = make_model("untied")
    [scores] = score(model, [TEXTS[1]], top=11)
    h = np.asarray(jax.jit(lambda ids: model(ids))(np.array([TEXTS[1]])), np.float64)[0]
    logits = h @ np.asarray(model.head.weight[...], np.float64)[:11].T
    for token, row in zip(scores[1:], logits, strict=False):
        assert token.lse == pytest.approx(np.logaddexp.reduce(row), abs=CLOSE)


def test_the_first_token_has_no_score_without_a_prefix(make_model):
    _, model = make_model()
    found = score(model, TEXTS, top=2)
    for text, scores, log_probs in zip(TEXTS, found, dense(model, TEXTS), strict=True):
        assert scores[0] == (text[0], None, None, None, None, None, None)
        check(scores[1:], log_probs, text[1:], 2)


def test_scores_do_not_depend_on_batch_padding_or_blocks(make_model):
    _, model = make_model("mixture_of_softmaxes", max_length=40)
    long = list(itertools.islice(itertools.cycle([3, 1, 4, 1, 5, 9, 2, 6]), 70))
    texts = [*TEXTS, long]
    reference = score(model, texts, top=2, stride=7)
    alone = [score(model, [text], top=2, stride=7)[0] for text in texts]
    single = score(model, texts[::-1], top=2, stride=7, batch_size=1)[::-1]
    model.head.block_rows = 3
    blocks = score(model, texts, top=2, stride=7, batch_size=3)
    model.head.block_rows = None
    for other in (alone, single, blocks):
        for one, two in zip(
            *(itertools.chain(*scores) for scores in (reference, other)), strict=True
        ):
            assert (one.id, one.rank, one.context) == (two.id, two.rank, two.context)
            if one.log_prob is not None:
                assert one.log_prob == pytest.approx(two.log_prob, abs=CLOSE)
                assert one.entropy == pytest.approx(two.entropy, abs=CLOSE)


@pytest.mark.parametrize("stride", [1, 5, 12, None])
def test_a_long_text_is_scored_in_windows_and_each_token_with_its_context(
    stride, make_model, sizes
):
    _, model = make_model("untied")
    longest, step = sizes.max_length, stride or sizes.max_length // 2
    text = [int(i) for i in np.random.default_rng(0).integers(0, sizes.vocabulary, 41)]
    [scores] = score(model, [text], stride=stride)
    assert len(scores) == len(text)
    seen = [text[place - token.context : place + 1] for place, token in enumerate(scores) if place]
    wanted = dense(model, seen)
    for place, token in enumerate(scores[1:], start=1):
        assert token.id == text[place]
        at_least = min(place, longest - step + 1)
        assert at_least <= token.context <= min(place, longest)
        assert token.log_prob == pytest.approx(wanted[place - 1][-1][text[place]], abs=CLOSE)


@pytest.mark.parametrize(("length", "longest", "stride"), [(100, 12, 5), (13, 12, 12), (12, 12, 1)])
def test_windows_score_every_token_once(length, longest, stride):
    for first in (1, 4, 30):
        windows = cut(0, length, first, longest, stride)
        places = [i for w in windows for i in range(w.first, w.stop)]
        assert places == list(range(first, length))
        assert all(w.stop - w.start - 1 <= longest for w in windows)


def test_shapes_are_few():
    assert {bucket(n, 100) for n in range(1, 101)} == {16, 32, 64, 100}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tokens": [[1], []]}, "text 1 is empty"),
        ({"tokens": [[1, 11]]}, r"text 0 has the id 11; ids must be in \[0, 11\)"),
        ({"prefix": [-1]}, "the prefix has the id -1"),
        ({"stride": 0}, "stride is 0; it must be in 1 … 12"),
        ({"stride": 13}, "stride is 13"),
        ({"top": 12}, "top is 12; it must be in 0 … 11"),
        ({"top": -1}, "top is -1"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_what_cannot_be_scored_is_refused(changed, said, make_model):
    asked = {"tokens": [[1, 2]]} | changed
    with pytest.raises(UsageError, match=said):
        score(make_model()[1], asked.pop("tokens"), **asked)


def test_a_model_that_is_not_finite_scores_nothing():
    from headlab.config import default_config, resolve

    config = default_config()
    config.model.update(d_model=8, n_layers=1, n_heads=2, max_length=16)
    config.data.seq_len = 16
    model = models.build(resolve(config), 11)
    model.final_norm.gain[...] = jnp.full(8, jnp.nan)
    with pytest.raises(HeadlabError, match="token 1 of sequence 0 is NaN"):
        score(model, [[1, 2]])
