"""The order of batches is a function of seed and step; no target is lost or counted twice."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from headlab.data import EvalBatches, TrainBatches
from headlab.data.batches import permuted, placed
from headlab.errors import UsageError

_MAY_UPDATE = (
    "the order of training batches has changed: resumed runs would see other data than they did, "
    "and recorded losses can't be had again. Update these values only if that has been decided."
)

GOLDEN_ORDER = [0, 3, 7, 4, 5, 9, 6, 1, 2, 8]
GOLDEN_WINDOWS = [[4, 7, 6], [0, 10, 8], [1, 2, 5], [3, 9, 10], [2, 8, 6]]
GOLDEN_INPUTS = [[4, 5, 6, 7], [8, 9, 10, 11], [20, 21, 22, 23]]


def _stream(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.uint16)  # the id is the place: windows show where they come from


@pytest.mark.parametrize("size", [*range(1, 70), 97, 100, 1000, 1023, 1024, 1025, 65_537])
def test_every_epoch_is_a_permutation_of_the_windows(size: int):
    for epoch in range(3):
        order = permuted(np.arange(size), size, f"0/{epoch}")
        assert order.dtype == np.int64
        assert np.array_equal(np.sort(order), np.arange(size))


def test_the_permutation_never_changes():
    assert permuted(np.arange(10), 10, "0/0").tolist() == GOLDEN_ORDER, _MAY_UPDATE


def test_the_batches_never_change():
    batches = TrainBatches(_stream(42), seq_len=4, batch_size=3, seed=1)
    windows = [batches.windows(step).tolist() for step in range(5)]
    assert windows == GOLDEN_WINDOWS, _MAY_UPDATE
    assert batches.batch(2).inputs.tolist() == GOLDEN_INPUTS, _MAY_UPDATE


def test_places_of_an_epoch_are_uniform_over_windows():
    # Pearson's χ² of where window 0..n-1 goes in many epochs: each cell expects n_epochs/n.
    n, n_epochs = 12, 6000
    counts = np.zeros((n, n))
    for epoch in range(n_epochs):
        counts[np.arange(n), permuted(np.arange(n), n, f"7/{epoch}")] += 1
    chi2 = ((counts - n_epochs / n) ** 2 / (n_epochs / n)).sum()
    freedom = (n - 1) ** 2
    assert abs(chi2 - freedom) < 5 * math.sqrt(2 * freedom)  # χ² has variance 2·freedom


def test_neighbours_in_the_stream_are_not_neighbours_in_the_order():
    n = 5000
    order = permuted(np.arange(n), n, "0/0")
    ranks = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(ranks) < 5 / math.sqrt(n)


@pytest.mark.parametrize("size", [1, 2, 3, 10, 1000, 1025, (1 << 45) + 12_345])
def test_the_place_of_a_window_is_where_the_order_has_it(size: int):
    places = np.unique(np.linspace(0, size - 1, 500, dtype=np.int64))
    for epoch in range(3):
        order = permuted(places, size, f"5/{epoch}")
        assert np.array_equal(placed(order, size, f"5/{epoch}"), places)


@pytest.mark.parametrize("n_tokens", [2, 40, 41, 42, 44])
@pytest.mark.parametrize("batch_size", [1, 3, 25])
def test_the_targets_seen_are_those_that_count_in_the_batches(n_tokens: int, batch_size: int):
    batches = TrainBatches(_stream(n_tokens), seq_len=4, batch_size=batch_size, seed=2)
    counted = 0
    for step in range(60):
        assert batches.targets_seen(step) == counted
        counted += int(batches.batch(step).where.sum())


@pytest.mark.parametrize("batch_size", [1, 3, 10, 11, 25])
def test_each_window_comes_once_an_epoch_even_where_a_batch_straddles_two(batch_size: int):
    batches = TrainBatches(_stream(41), seq_len=4, batch_size=batch_size, seed=3)
    assert batches.n_windows == 10
    n_epochs = 5 * batch_size  # so that whole batches fill whole epochs
    steps = n_epochs * batches.n_windows // batch_size
    seen = np.concatenate([batches.windows(step) for step in range(steps)])
    for epoch in seen.reshape(n_epochs, batches.n_windows):
        assert np.array_equal(np.sort(epoch), np.arange(10))


def test_a_batch_depends_on_seed_and_step_alone():
    tokens = _stream(1000)
    forward = TrainBatches(tokens, 8, 5, seed=11)
    expected = [forward.batch(step) for step in range(60)]
    resumed = TrainBatches(tokens.copy(), 8, 5, seed=11)
    np.random.seed(123)  # NumPy's global generator must not matter
    for step in [59, 3, 3, 0, 31]:
        for a, b in zip(resumed.batch(np.int32(step)), expected[step], strict=True):
            assert np.array_equal(a, b)


def test_epochs_and_seeds_have_orders_of_their_own():
    tokens = _stream(1001)
    orders = [TrainBatches(tokens, 10, 100, seed).windows(s) for seed in (-1, 0, 1) for s in (0, 1)]
    assert len({order.tobytes() for order in orders}) == 6


def test_a_window_is_its_tokens_and_their_successors():
    batch = TrainBatches(_stream(43), seq_len=4, batch_size=11, seed=0).batch(0)
    assert batch.inputs.dtype == batch.targets.dtype == np.int32
    assert batch.where.dtype == np.bool_
    assert np.array_equal(batch.targets[batch.where], batch.inputs[batch.where] + 1)
    assert np.array_equal(np.sort(batch.targets[batch.where]), np.arange(1, 43))
    assert batch.where.sum(axis=1).tolist().count(2) == 1  # the last window has 42 mod 4 targets
    assert not batch.inputs[~batch.where].any()
    assert not batch.targets[~batch.where].any()


@pytest.mark.parametrize("n_tokens", [2, 3, 9, 10, 11, 64, 65, 66, 1000])
@pytest.mark.parametrize("batch_size", [1, 3, 4, 7, 64])
@pytest.mark.parametrize("seq_len", [1, 8, 64])
def test_evaluation_covers_each_target_once_in_full_batches(
    n_tokens: int, batch_size: int, seq_len: int
):
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 100, n_tokens).astype(np.uint16)
    batches = EvalBatches(tokens, seq_len, batch_size)
    seen = list(batches)
    assert len(seen) == len(batches) == math.ceil(math.ceil((n_tokens - 1) / seq_len) / batch_size)
    assert {array.shape for batch in seen for array in batch} == {(batch_size, seq_len)}
    where = np.concatenate([batch.where.ravel() for batch in seen])
    inputs = np.concatenate([batch.inputs.ravel() for batch in seen])
    targets = np.concatenate([batch.targets.ravel() for batch in seen])
    assert np.array_equal(inputs[where], tokens[:-1])
    assert np.array_equal(targets[where], tokens[1:])
    assert not inputs[~where].any()
    assert not targets[~where].any()
    assert Counter(where.tolist())[True] == n_tokens - 1


def test_evaluation_batches_can_be_read_again():
    batches = EvalBatches(_stream(100), 8, 4)
    first, second = ([batch.inputs.tolist() for batch in batches] for _ in range(2))
    assert first == second


def test_places_beyond_two_to_the_31_are_read_right(tmp_path: Path):
    # A sparse file of 2³² + 1000 tokens takes no room on the disk; all but the last are 0.
    n = (1 << 32) + 1000
    file = tmp_path / "tokens.bin"
    with file.open("wb") as handle:
        handle.truncate(2 * n)
        handle.seek(2 * (n - 3))
        handle.write(np.array([7, 8, 9], "<u2").tobytes())
    tokens = np.memmap(file, "<u2", mode="r")
    seq_len = 1 << 20
    batches = TrainBatches(tokens, seq_len, batch_size=1, seed=0)
    assert batches.n_windows == (1 << 12) + 1
    last = batches.n_windows - 1  # it begins at 2³²
    step = int(np.flatnonzero(permuted(np.arange(last + 1), last + 1, "0/0") == last)[0])
    assert batches.windows(step).tolist() == [last]
    batch = batches.batch(step)
    assert batch.where[0].sum() == 999
    assert batch.inputs[0, 997:1000].tolist() == [7, 8, 0]
    assert batch.targets[0, 996:1000].tolist() == [7, 8, 9, 0]


def test_the_order_needs_no_memory_however_many_windows_there_are():
    size = (1 << 45) + 12_345
    places = np.concatenate([np.arange(5000), size - 5000 + np.arange(5000)])
    order = permuted(places, size, "0/0")
    assert len(np.unique(order)) == len(places)
    assert order.min() >= 0
    assert order.max() < size
    assert order.max() > size // 2


@pytest.mark.parametrize(
    ("n_tokens", "seq_len", "batch_size", "message"),
    [
        (1, 4, 2, "at least 2 tokens"),
        (9, 0, 2, "seq_len is 0"),
        (9, 4, -1, "batch_size is -1"),
    ],
)
def test_sizes_that_make_no_batch_are_refused(n_tokens, seq_len, batch_size, message):
    for make in (
        lambda *sizes: TrainBatches(*sizes, seed=0),
        EvalBatches,
    ):
        with pytest.raises(UsageError, match=message):
            make(_stream(n_tokens), seq_len, batch_size)


def test_a_negative_step_is_refused():
    with pytest.raises(UsageError, match="step is -1"):
        TrainBatches(_stream(9), 4, 2, seed=0).batch(-1)
