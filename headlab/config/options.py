"""The one table of every option: its default, type, allowed values and a line of help with units.

The options of one particular head are not here: they are the keyword parameters of its class.
"""

import dataclasses
import math
import re
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Option:
    """One option: `type` is an annotation as `int | None`, `allowed` an interval as "[0, 1)"."""

    default: Any
    type: Any
    help: str
    allowed: str = ""
    later: bool = (
        False  # came after there were runs: at its default it leaves `config_hash` as it was
    )


REQUIRED: Any = dataclasses.MISSING  # the default of a head's option that has none

_SEED_LIMIT = 2**31 - 1  # the largest seed that every JAX key accepts without 64-bit integers
_AT_LEAST_1 = "[1, inf)"
_AT_LEAST_0 = "[0, inf)"
_ABOVE_0 = "(0, inf)"
_FRACTION = "[0, 1]"
_BELOW_1 = "[0, 1)"


def _group(init_scale: float) -> dict[str, Option]:
    return {
        "rate_multiplier": Option(1.0, float, "factor of the learning rate", _AT_LEAST_0),
        "weight_decay": Option(0.1, float, "decoupled weight decay of matrices", _AT_LEAST_0),
        "init_scale": Option(
            init_scale,
            float,
            "standard deviation of initial weights, times sqrt(fan-in)",
            _AT_LEAST_0,
        ),
    }


_TREE: dict[str, Any] = {
    "seed": Option(
        0, int, "seed of initial weights, batch order and dropout", f"[0, {_SEED_LIMIT}]"
    ),
    "data": {
        "corpus": Option("headlab_english", str, "headlab_english, tfds:NAME or text:GLOB"),
        "tokenizer": Option(None, str | None, "a tokenizer.json; none trains a byte-level BPE"),
        "vocab_size": Option(8192, int, "tokens in the vocabulary", "[2, inf)"),
        "seq_len": Option(128, int, "tokens a training sequence", _AT_LEAST_1),
    },
    "model": {
        "d_model": Option(128, int, "width of the hidden state", _AT_LEAST_1),
        "n_layers": Option(4, int, "decoder blocks", _AT_LEAST_1),
        "n_heads": Option(4, int, "attention heads; divides d_model", _AT_LEAST_1),
        "n_kv_heads": Option(
            None, int | None, "key-value heads; divides n_heads; none = n_heads", _AT_LEAST_1
        ),
        "d_mlp": Option(
            None,
            int | None,
            "width inside the MLP; none = 4 d_model, for swiglu 8/3 d_model up to a multiple of 8",
            _AT_LEAST_1,
        ),
        "d_head": Option(
            None,
            int | None,
            "width of an attention head; none = d_model / n_heads",
            _AT_LEAST_1,
            True,
        ),
        "position": Option("learned", Literal["learned", "rotary"], "position encoding"),
        "max_length": Option(128, int, "tokens of the longest sequence", _AT_LEAST_1),
        "rope_theta": Option(10000.0, float, "base of the rotary wavelengths", _ABOVE_0),
        "rope_scaling": Option(
            None,
            tuple[float, float, float, float] | None,
            "Llama 3's longer rotary wavelengths: (factor, low, high, original length)",
            later=True,
        ),
        "norm": Option("rms", Literal["rms", "layer"], "RMSNorm or LayerNorm"),
        "norm_eps": Option(
            1e-6, float, "added to the mean square that a norm divides by", _ABOVE_0, True
        ),
        "bias": Option(False, bool, "biases in attention, MLP and LayerNorm"),
        "qkv_bias": Option(
            False, bool, "biases of queries, keys and values, without model.bias too", later=True
        ),
        "output_bias": Option(
            False, bool, "a bias of the attention's output, without model.bias too", later=True
        ),
        "mlp_bias": Option(False, bool, "biases in the MLP, without model.bias too", later=True),
        "activation": Option("gelu", Literal["gelu", "swiglu"], "kind of MLP"),
        "dropout": Option(0.0, float, "share of activations dropped in training", _BELOW_1),
        "remat": Option(False, bool, "recompute blocks in the backward pass to save memory"),
    },
    "head": {
        "name": Option("tied", str, "the output head"),
        "vocab_multiple": Option(128, int, "rows are padded to a multiple of this", _AT_LEAST_1),
        "sum_order": Option(
            "fast",
            Literal["fast", "invariant"],
            "order of sums over the vocabulary; invariant gives the same bits on any mesh.vocab",
        ),
        "sum_blocks": Option(
            8, int, "blocks of rows of the invariant order; a power of two", _AT_LEAST_1
        ),
        "untie_at": Option(
            None, float | None, "share of the steps after which a tied head is untied", "(0, 1)"
        ),
    },
    "groups": {"embedding": _group(0.25), "head": _group(0.25), "body": _group(1.0)},
    "optimizer": {
        "peak_rate": Option(2e-3, float, "learning rate after warm-up", _ABOVE_0),
        "schedule": Option("cosine", Literal["cosine", "linear", "constant"], "decay of the rate"),
        "warmup_steps": Option(
            None,
            int | None,
            "steps of linear warm-up; none = a twentieth of the steps",
            _AT_LEAST_0,
        ),
        "final_fraction": Option(0.1, float, "last rate, as a fraction of the peak", _FRACTION),
        "b1": Option(0.9, float, "decay a step of Adam's first moment", _BELOW_1),
        "b2": Option(0.95, float, "decay a step of Adam's second moment", _BELOW_1),
        "eps": Option(1e-8, float, "added to the root of Adam's second moment", _ABOVE_0),
        "clip_norm": Option(
            1.0, float | None, "largest global gradient norm; none = no limit", _ABOVE_0
        ),
    },
    "train": {
        "steps": Option(6000, int, "optimizer steps", _AT_LEAST_1),
        "batch_size": Option(16, int, "sequences a step, over all devices", _AT_LEAST_1),
        "micro_batches": Option(1, int, "parts of a step's gradient, made in turn", _AT_LEAST_1),
        "z_loss_weight": Option(0.0, float, "weight of the squared log-partition", _AT_LEAST_0),
        "label_smoothing": Option(0.0, float, "mass spread evenly over the vocabulary", _BELOW_1),
        "compute_dtype": Option("float32", Literal["float32", "bfloat16"], "dtype of the body"),
    },
    "eval": {
        "every": Option(500, int, "steps between held-out evaluations", _AT_LEAST_1),
        "batch_size": Option(
            64, int, "sequences an evaluation batch, over all devices", _AT_LEAST_1
        ),
    },
    "checkpoint": {
        "every": Option(500, int, "steps between checkpoints", _AT_LEAST_1),
        "keep": Option(2, int, "latest checkpoints kept, beside the best one", _AT_LEAST_1),
    },
    "log": {
        "every": Option(10, int, "steps between lines of training metrics", _AT_LEAST_1),
        "tensorboard": Option(
            True, bool, "write TensorBoard events where tensorboardX is installed"
        ),
        "progress": Option(True, bool, "show a progress bar on a terminal"),
    },
    "mesh": {
        "data": Option(1, int, "devices that share each batch; -1 = the rest", "[-1, inf)"),
        "vocab": Option(1, int, "devices that share the vocabulary; -1 = the rest", "[-1, inf)"),
        "fsdp": Option(False, bool, "shard the body and its optimizer state over mesh.data"),
    },
}


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Option]:
    flat: dict[str, Option] = {}
    for name, node in tree.items():
        flat |= (
            {prefix + name: node} if isinstance(node, Option) else _flat(node, f"{prefix}{name}.")
        )
    return flat


OPTIONS: dict[str, Option] = _flat(_TREE)
"""Every option by its dotted key, in the order in which a reader meets them."""

OPERATIONAL = ("mesh.", "log.", "checkpoint.", "eval.batch_size")
"""Prefixes of the keys that say how a run is carried out, not what it computes."""


def within(value: float, interval: str) -> bool:
    """Whether a number lies in an interval written as in mathematics; NaN lies in none.

    >>> within(0, "[0, 1)"), within(1, "[0, 1)"), within(float("nan"), "[0, inf)")
    (True, False, False)
    """
    left, low, high, right = _ends(interval)
    above = value >= low if left == "[" else value > low
    below = value <= high if right == "]" else value < high
    return above and below


def interval_in_words(interval: str) -> str:
    """An interval as an error message says it.

    >>> interval_in_words("[1, inf)"), interval_in_words("(0, inf)"), interval_in_words("[0, 1)")
    ('at least 1', 'greater than 0', 'in [0, 1)')
    """
    left, low, high, _ = _ends(interval)
    if math.isinf(high):
        return f"{'at least' if left == '[' else 'greater than'} {low:g}"
    return f"in {interval}"


def _ends(interval: str) -> tuple[str, float, float, str]:
    parts = re.fullmatch(r"([\[(])(.+), (.+)([\])])", interval)
    if parts is None:
        raise ValueError(f"not an interval such as '[0, 1)': {interval!r}")
    left, low, high, right = parts.groups()
    return left, float(low), float(high), right
