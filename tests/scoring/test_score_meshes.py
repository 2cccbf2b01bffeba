"""Scores and choices of a vocabulary that is sharded over a mesh: those of one device, to the bit where promised."""

import itertools

import pytest

from headlab import sharding
from headlab.errors import UsageError
from headlab.scoring import choose, score

TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7, 1], [10]]
PREFIX = [0]
# of sums of eight products and eleven exponentials, float32: some twenty roundings of numbers below 40
CLOSE = 1e-5 * 3


@pytest.mark.parametrize(
    ("head", "data", "vocab"), [("tied", 2, 4), ("mixture_of_softmaxes", 1, 8)]
)
def test_scores_on_a_mesh_are_those_of_one_device(head, data, vocab, make_model):
    """Of three windows, which two devices do not share evenly."""
    _, model = make_model(head)
    wanted, found = (
        score(model, TEXTS, top=3, prefix=PREFIX, batch_size=4, mesh=mesh)
        for mesh in (None, sharding.make_mesh(data, vocab))
    )
    for one, two in zip(*map(itertools.chain.from_iterable, (wanted, found)), strict=True):
        assert (one.id, one.rank, one.context) == (two.id, two.rank, two.context)
        assert [i for i, _ in one.top] == [i for i, _ in two.top]
        numbers = [(t.log_prob, t.entropy, t.lse or 0, *(p for _, p in t.top)) for t in (one, two)]
        assert numbers[0] == pytest.approx(numbers[1], abs=CLOSE)


@pytest.mark.slow
@pytest.mark.optimised
@pytest.mark.parametrize(
    ("head", "shards"), [("tied", 2), ("tied", 4), ("tied", 8), ("mixture_of_softmaxes", 8)]
)
def test_in_the_invariant_order_scores_have_the_same_bits_on_any_number_of_shards(
    head, shards, make_model
):
    _, model = make_model(head, sum_order="invariant", sum_blocks=8)
    wanted = score(model, TEXTS, top=3, prefix=PREFIX)
    chosen = choose(model, TEXTS[1], [[3], [4, 5, 6]])
    mesh = sharding.make_mesh(1, shards)
    assert score(model, TEXTS, top=3, prefix=PREFIX, mesh=mesh) == wanted
    assert choose(model, TEXTS[1], [[3], [4, 5, 6]], mesh=mesh) == chosen


def test_what_a_mesh_cannot_share_is_refused(make_model):
    _, model = make_model()
    with pytest.raises(
        UsageError, match="embedding/weight has 16 rows, which 3 shards .* shards=3"
    ):
        score(model, TEXTS, mesh=sharding.make_mesh(1, 3))
    with pytest.raises(UsageError, match="batch_size is 3; it must be a multiple of 2"):
        score(model, TEXTS, batch_size=3, mesh=sharding.make_mesh(2, 1))
