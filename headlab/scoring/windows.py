"""How texts of any length are cut into the few shapes that a program is compiled for."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

SHORTEST = 16  # positions of the smallest shape


class Window(NamedTuple):
    """The tokens `first … stop−1` of a sequence, each scored by this window alone, which begins at `start`."""

    sequence: int
    start: int
    first: int
    stop: int


class Packed(NamedTuple):
    """Windows of one compiled shape."""

    windows: tuple[Window, ...]
    inputs: np.ndarray  # [rows, length], int32
    targets: np.ndarray  # [rows, length − skipped]
    skipped: int  # leading positions of every row whose tokens an earlier window scores


def bucket(length: int, longest: int) -> int:
    """The least power of two that is at least `length` and 16, at most `longest`."""
    return min(max(SHORTEST, 1 << max(length - 1, 0).bit_length()), longest)


def default_stride(longest: int) -> int:
    """Half of the longest sequence, rounded up: each token but the first ones has half of it before it.

    >>> default_stride(128), default_stride(5)
    (64, 3)
    """
    return -(-longest // 2)


def cut(sequence: int, length: int, first: int, longest: int, stride: int) -> list[Window]:
    """The windows over a sequence of `length` tokens, of which those from `first` ≥ 1 on are scored.

    A window reads at most `longest` tokens and scores the one after each of them. Windows begin every `stride` tokens;
    each but the first one scores its last `stride` tokens.
    """
    windows, start = [], 0
    while first < length:
        stop = min(start + longest + 1, length)
        if first < stop:
            windows.append(Window(sequence, start, first, stop))
        first = max(first, stop)
        start += stride
    return windows


def pack(
    sequences: Sequence[np.ndarray],
    windows: Sequence[Window],
    longest: int,
    rows: int,
    stride: int,
    *,
    devices: int = 1,
) -> Iterator[Packed]:
    """All windows, alike ones together, at most `rows` at once; short batches are padded to a power of two rows.

    `devices`, of which `rows` is a multiple, have so many rows each.

    Padding repeats the id 0, which a causal model does not see, at positions and in rows whose results nobody reads.
    """
    groups: dict[tuple[int, int], list[Window]] = defaultdict(list)
    for window in windows:
        skipped = longest - stride if window.start else 0
        length = longest if window.start else bucket(window.stop - 1, longest)
        groups[length, skipped].append(window)
    for (length, skipped), alike in groups.items():
        for i in range(0, len(alike), rows):
            chosen = tuple(alike[i : i + rows])
            own = -(-len(chosen) // devices)  # rows of a device
            height = min(rows, devices << (own - 1).bit_length())
            inputs = np.zeros((height, length), np.int32)
            targets = np.zeros((height, length), np.int32)
            for row, window in enumerate(chosen):
                tokens = sequences[window.sequence][window.start : window.stop]
                inputs[row, : len(tokens) - 1] = tokens[:-1]
                targets[row, : len(tokens) - 1] = tokens[1:]
            yield Packed(chosen, inputs, targets[:, skipped:], skipped)
