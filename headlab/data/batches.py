"""Which tokens stand in which batch: a pure function of (seed, step), or the stream in order.

A stream of N tokens has N-1 targets and ⌈(N-1)/T⌉ windows of T targets: window w reads `tokens[w·T
: (w+1)·T + 1]`. The last window is padded with id 0, masked by `where`.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headlab.errors import UsageError

if TYPE_CHECKING:
    from jaxtyping import Bool, Int32, Int64, Integer

_ROUNDS = 8


class Batch(NamedTuple):
    """Token ids, the ids that follow them, and which of these count; padding has id 0."""

    inputs: Int32[np.ndarray, "batch length"]
    targets: Int32[np.ndarray, "batch length"]
    where: Bool[np.ndarray, "batch length"]


class TrainBatches:
    """Training batches: each epoch takes every window once, in a pseudo-random order of its own.

    The batch of a step depends on `tokens`, the sizes, `seed` and the step alone, so that a resumed
    run needs nothing but its step. Batch s takes places s·B to (s+1)·B - 1 of the endless sequence
    of epochs; where one falls on the end of an epoch, it goes on with the next. No permutation is
    ever held in memory.

    Args:
      tokens: a stream, at least 2 tokens.
      seq_len: T, targets a window.
      batch_size: B, windows a batch.
      seed: any integer; it gives the order of each epoch.

    Raises UsageError for a size below 1 or fewer than 2 tokens.

    >>> train = TrainBatches(np.arange(9), seq_len=4, batch_size=2, seed=0)
    >>> sorted(train.batch(0).inputs.tolist())  # the order is the epoch's own
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    """

    def __init__(
        self, tokens: Integer[np.ndarray, " tokens"], seq_len: int, batch_size: int, seed: int
    ):
        self.n_windows = _n_windows(tokens, seq_len, batch_size)
        self._tokens, self._seq_len, self._batch_size = tokens, seq_len, batch_size
        self._seed = operator.index(seed)

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """The batch of `step`, counted from 0, or some of its rows; UsageError if the step is negative."""
        return _read(self._tokens, self.windows(step)[rows], self._seq_len)

    def targets_seen(self, steps: int) -> int:
        """How many targets the first `steps` batches count: all places but padding."""
        epochs, rest = divmod(operator.index(steps) * self._batch_size, self.n_windows)
        targets = len(self._tokens) - 1
        seen = epochs * targets + rest * self._seq_len
        last = np.array([self.n_windows - 1])
        if placed(last, self.n_windows, f"{self._seed}/{epochs}")[0] < rest:
            seen -= self.n_windows * self._seq_len - targets
        return seen

    def windows(self, step: int) -> Int64[np.ndarray, " batch"]:
        """The windows that stand in the batch of `step`, in order."""
        step = operator.index(step)
        if step < 0:
            raise UsageError(f"step is {step}; steps count from 0.")
        first = step * self._batch_size
        chosen: list[np.ndarray] = []
        while (taken := sum(map(len, chosen))) < self._batch_size:
            epoch, place = divmod(first + taken, self.n_windows)
            end = min(place + self._batch_size - taken, self.n_windows)
            places = np.arange(place, end, dtype=np.int64)
            chosen.append(permuted(places, self.n_windows, f"{self._seed}/{epoch}"))
        return np.concatenate(chosen)


class EvalBatches:
    """Batches for evaluation: every target of `tokens` once, in order, whatever the batch size.

    All batches have the shape [`batch_size`, `seq_len`]; what is left of the last one is padding.
    Iterate as often as wanted; `len` is the number of batches. Arguments and errors are those of
    `TrainBatches`.

    >>> [batch.targets[batch.where].tolist() for batch in EvalBatches(np.arange(6), 2, 2)]
    [[1, 2, 3, 4], [5]]
    """

    def __init__(self, tokens: Integer[np.ndarray, " tokens"], seq_len: int, batch_size: int):
        self.n_windows = _n_windows(tokens, seq_len, batch_size)
        self._tokens, self._seq_len, self._batch_size = tokens, seq_len, batch_size

    def __len__(self) -> int:
        return -(-self.n_windows // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for first in range(0, len(self) * self._batch_size, self._batch_size):
            windows = np.arange(first, first + self._batch_size, dtype=np.int64)
            yield _read(self._tokens, windows, self._seq_len)


def permuted(places: Int64[np.ndarray, " n"], size: int, key: str) -> Int64[np.ndarray, " n"]:
    """Where the pseudo-random permutation of `range(size)` that `key` names sends `places`.

    A number x < a·b, with a = ⌈√size⌉ and b = ⌈size/a⌉, is the pair (x div b, x mod b), and a
    Feistel network adds to one member a hash of the other, by turns: a permutation of range(a·b)
    (Black & Rogaway 2002, "Ciphers with arbitrary finite domains"). Results of `size` or more,
    fewer than a of them, go through it again until they are below (cycle walking), which leaves a
    permutation of range(size). It is made of integer arithmetic alone and stays the same in every
    version of NumPy.
    """
    return _walked(places, size, key, _feistel)


def placed(windows: Int64[np.ndarray, " n"], size: int, key: str) -> Int64[np.ndarray, " n"]:
    """The places that `permuted` sends to `windows`: its inverse."""
    return _walked(windows, size, key, _inverse_feistel)


def _walked(numbers: np.ndarray, size: int, key: str, network: Callable[..., np.ndarray]):
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
    keys = np.frombuffer(digest, "<u8")
    x = numbers.astype(np.uint64)
    walking = np.ones(len(x), bool)
    while walking.any():
        x[walking] = network(x[walking], np.uint64(a), np.uint64(b), keys)
        walking = x >= np.uint64(size)
    return x.astype(np.int64)


def _feistel(x: np.ndarray, a: np.uint64, b: np.uint64, keys: np.ndarray) -> np.ndarray:
    left: np.ndarray = x // b
    right: np.ndarray = x % b
    for number, key in enumerate(keys):
        if number % 2 == 0:
            left = (left + _mixed(right + key) % a) % a
        else:
            right = (right + _mixed(left + key) % b) % b
    return left * b + right


def _inverse_feistel(x: np.ndarray, a: np.uint64, b: np.uint64, keys: np.ndarray) -> np.ndarray:
    left: np.ndarray = x // b
    right: np.ndarray = x % b
    for number, key in reversed(list(enumerate(keys))):
        if number % 2 == 0:
            left = (left + a - _mixed(right + key) % a) % a
        else:
            right = (right + b - _mixed(left + key) % b) % b
    return left * b + right


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele et al. 2014), modulo 2⁶⁴."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _n_windows(tokens: np.ndarray, seq_len: int, batch_size: int) -> int:
    for name, value in (("seq_len", seq_len), ("batch_size", batch_size)):
        if value < 1:
            raise UsageError(f"{name} is {value}; it must be 1 or more.")
    if len(tokens) < 2:
        raise UsageError(
            f"a stream of {len(tokens)} tokens has no target; at least 2 tokens are needed."
        )
    return -(-(len(tokens) - 1) // seq_len)


def _read(tokens: np.ndarray, windows: np.ndarray, seq_len: int) -> Batch:
    """Windows of a stream as a batch; places behind the end of the stream are padding."""
    # int64: places in a stream pass 2³¹ long before a stream is large.
    places = windows[:, None] * np.int64(seq_len) + np.arange(seq_len, dtype=np.int64)
    where = places < len(tokens) - 1
    first = np.where(where, places, 0)
    inputs = np.where(where, tokens[first], 0).astype(np.int32)
    targets = np.where(where, tokens[first + where], 0).astype(np.int32)
    return Batch(inputs, targets, where)
