"""Where the vocabulary is cut: what is refused, the order of tokens, and the cutoffs of the cost model."""

import itertools

import numpy as np
import pytest

from headlab.embeddings.cutoffs import (
    band_sizes,
    band_widths,
    check_cutoffs,
    choose_cutoffs,
    resolve_cutoffs,
    token_order,
)


@pytest.mark.parametrize("cutoffs", [(), (10,), (1,), (4, 8), [4, 8], (1, 2, 3, 10)])
def test_cutoffs_inside_the_vocabulary_are_taken(cutoffs):
    found = check_cutoffs(cutoffs, 11)
    assert found == tuple(cutoffs)
    assert sum(band_sizes(found, 11)) == 11 and min(band_sizes(found, 11)) >= 1


@pytest.mark.parametrize(
    ("cutoffs", "reason"),
    [
        ((4, 11), "11 is not in 1 … 10"),
        ((12,), "12 is not in 1 … 10"),
        ((0, 4), "0 is not in 1 … 10"),
        ((-1,), "-1 is not in 1 … 10"),
        ((8, 4), "must ascend, and 4 comes after 8"),
        ((4, 4), "must ascend, and 4 comes after 4"),
        ((4.0,), "4.0 is not an integer"),
        ((True,), "True is not an integer"),
    ],
)
def test_other_cutoffs_are_refused_with_the_reason(cutoffs, reason):
    with pytest.raises(ValueError, match=reason):
        check_cutoffs(cutoffs, 11)


def test_widths_fall_by_div_value_and_never_to_nothing():
    assert band_widths(128, 4.0, 4) == (128, 32, 8, 2)
    assert band_widths(6, 1.0, 3) == (6, 6, 6)
    assert band_widths(100, 1.5, 3) == (100, 66, 44)
    with pytest.raises(ValueError, match=r"div_value is 4\.0; band 4 .* 128 // 4\.0\^4 = 0"):
        band_widths(128, 4.0, 5)
    for value in (0.5, 0.0, -2.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"div_value is {value}; it must be at least 1"):
            band_widths(128, value, 2)


def test_tokens_are_ordered_by_count_then_id_and_within_a_band_by_id():
    counts = np.array([3, 0, 7, 3, 9, 0, 3])
    assert token_order((), 7, counts).tolist() == list(range(7))
    # by count: 4, 2, then 0, 3 and 6 with three each, then 1 and 5
    assert token_order((2, 4), 7, counts).tolist() == [2, 4, 0, 3, 1, 5, 6]
    assert token_order((2, 4), 7, None).tolist() == list(range(7))
    assert token_order((2, 4), 7, counts).dtype == np.int32


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        (np.ones(6), r"token_counts are \(6,\); they must be \(7,\)"),
        (np.array([1, 1, 1, -1, 1, 1, 1]), "negative"),
        (np.array([1, 1, 1, np.nan, 1, 1, 1]), "not finite"),
    ],
)
def test_impossible_counts_are_refused(counts, reason):
    for call in (
        lambda: token_order((2,), 7, counts),
        lambda: resolve_cutoffs(
            "auto", vocab_size=7, d_model=8, div_value=4.0, token_counts=counts
        ),
    ):
        with pytest.raises(ValueError, match=reason):
            call()


def zipf(vocab):
    return 1e6 / np.arange(1, vocab + 1)


def cost(cutoffs, counts):
    """The model of Grave et al. 2017 with the constants that `choose_cutoffs` documents, written anew."""
    share = np.sort(counts)[::-1] / counts.sum()

    def g(size, tokens):
        return 2**21 + max(2**17, size * tokens)

    edges = [*cutoffs, counts.size]
    tails = [g(b - a, 4096 * share[a:b].sum()) for a, b in itertools.pairwise(edges)]
    return g((edges[0] if cutoffs else counts.size) + len(tails), 4096) + sum(tails)


@pytest.mark.parametrize("counts", [zipf(8192), np.arange(8192, 0, -1), zipf(4000) ** 0.5])
def test_automatic_cutoffs_cost_the_least_of_all_on_the_grid(counts):
    """Against every choice of up to two boundaries."""
    grid = [m << s for s in range(12) for m in (4, 5, 6, 7) if m << s < counts.size]
    by_tails = [
        min((cost(chosen, counts), chosen) for chosen in itertools.combinations(grid, n))
        for n in range(3)
    ]
    expected, chosen = by_tails[0]
    for least, best in by_tails[1:]:
        if least < 0.95 * expected:
            expected, chosen = least, best
    found = choose_cutoffs(counts, most_tails=2)
    assert found == chosen
    assert cost(found, counts) == pytest.approx(expected)


def test_automatic_cutoffs_suit_the_size_of_the_vocabulary():
    for vocab in (2, 3, 11, 24, 100):
        assert choose_cutoffs(zipf(vocab)) == ()  # a second product would cost more than it saves
    counts = zipf(262_144)
    found = choose_cutoffs(counts)
    assert check_cutoffs(found, counts.size) == found and len(found) == 4
    assert 1000 < found[0] < 10_000
    assert cost(found, counts) < 0.1 * cost((), counts)
    small = choose_cutoffs(zipf(8192))
    assert 1 <= len(small) <= 2 and cost(small, zipf(8192)) < 0.6 * cost((), zipf(8192))


def test_automatic_cutoffs_depend_on_counts_alone_and_not_on_their_order_or_scale():
    counts = zipf(5000)
    shuffled = np.random.default_rng(0).permutation(counts)
    assert choose_cutoffs(counts) == choose_cutoffs(shuffled) == choose_cutoffs(3 * counts)
    assert choose_cutoffs(np.zeros(5000)) == choose_cutoffs(np.ones(5000))


def test_automatic_cutoffs_leave_every_tail_a_width():
    resolved = resolve_cutoffs(
        "auto", vocab_size=262_144, d_model=20, div_value=4.0, token_counts=zipf(262_144)
    )
    assert len(resolved) == 2 and band_widths(20, 4.0, 3) == (20, 5, 1)


@pytest.mark.parametrize("cutoffs", ["auto", (4,)])
def test_an_impossible_div_value_is_refused_before_anything_is_chosen(cutoffs):
    for value in (0.0, 0.5, float("nan")):
        with pytest.raises(ValueError, match=f"div_value is {value}; it must be at least 1"):
            resolve_cutoffs(
                cutoffs, vocab_size=11, d_model=6, div_value=value, token_counts=np.ones(11)
            )


def test_automatic_cutoffs_need_counts_and_other_words_mean_nothing():
    given = dict(vocab_size=11, d_model=6, div_value=4.0)
    with pytest.raises(ValueError, match=r"'auto', which needs token_counts"):
        resolve_cutoffs("auto", token_counts=None, **given)
    with pytest.raises(ValueError, match="cutoffs are 'many'; they must be 'auto' or integers"):
        resolve_cutoffs("many", token_counts=np.ones(11), **given)
