"""Operations and bytes of a head and of a decoder's blocks; a multiply-add counts as two operations."""

from typing import Literal, NamedTuple

Mode = Literal["training", "scoring", "decoding"]


_PASSES: dict[Mode, int] = {"training": 3, "scoring": 1, "decoding": 1}


def passes(mode: Mode) -> int:
    """How often each product of a forward pass is made: in training also for the gradients of both its factors.

    Raises ValueError where `mode` is none.
    """
    if mode not in _PASSES:
        raise ValueError(f"mode is {mode!r}; it must be 'training', 'scoring' or 'decoding'")
    return _PASSES[mode]


class HeadCost(NamedTuple):
    """What a head costs."""

    parameters: int  # the head's own, without padding and without what it ties to
    flops_per_token: float
    bytes_read: float  # parameter bytes that one pass over the head reads, tied ones included


def linear_head_cost(
    mode: Mode, *, vocab_size: int, d_model: int, own_parameters: int, itemsize: int = 4
) -> HeadCost:
    """A dense softmax: 2·d·V operations a token forward, three times that in training (h, dh and dW).

    >>> linear_head_cost("decoding", vocab_size=8192, d_model=128, own_parameters=0)
    HeadCost(parameters=0, flops_per_token=2097152.0, bytes_read=4194304.0)
    """
    matrix = vocab_size * d_model
    return HeadCost(own_parameters, 2.0 * matrix * passes(mode), float(matrix * itemsize))


def body_flops_per_token(
    *,
    d_model: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    d_head: int,
    d_mlp: int,
    gated: bool,
    length: int,
) -> float:
    """Forward operations a token of the decoder's blocks.

    A block multiplies by its matrices (query and output d·d_head·n_heads each, keys and values d·d_head·n_kv_heads
    each, MLP two or, gated, three of d·d_mlp) and attends to on average (length + 1)/2 positions, twice
    2·d_head·n_heads operations each.
    """
    projections = 2 * d_model * d_head * (n_heads + n_kv_heads)
    mlp = d_model * d_mlp * (3 if gated else 2)
    attention = 2 * d_head * n_heads * (length + 1) / 2
    return n_layers * 2.0 * (projections + mlp + attention)
