"""What a model costs, and how much of it is the head: the figures of `headlab cost`."""

from typing import Any, NamedTuple

from headlab.costs.architecture import Architecture
from headlab.costs.arithmetic import HeadCost
from headlab.costs.chips import Chip
from headlab.errors import UsageError

_LOGIT_BYTES = 4  # logits and log-probabilities are float32


class Setting(NamedTuple):
    """What is asked about a model; every number at least 1."""

    context: int = 1024  # tokens of a prompt, and those a decode step attends to
    batch: int = 1  # sequences
    itemsize: int = 2  # bytes of a parameter, and of a key or value
    shards: int = 1  # devices that the rows of the vocabulary are sharded over


class ModelCost(NamedTuple):
    """The cost of one model in one setting. FLOPs are operations; a multiply-add counts as two."""

    name: str
    setting: Setting
    parameters: dict[
        str, int
    ]  # "embedding" (positions too), "body", "head", "total"; a tied table once
    head_flops: float  # a token, forward
    block_flops: float  # a token, forward, of the mean block
    body_flops: float  # a token, forward, of all blocks
    decode_head_flops: float  # a token, when the whole distribution is needed
    training_head_flops: float  # a token, forward and backward
    blocks_by_matrices: float  # head_flops over 2·(the entries of a block's matrices)
    blocks_by_shorthand: float  # 2·d·V over 24·d², the usual count of a block's operations
    head_bytes: float  # read by a decode step
    body_bytes: float
    kv_bytes: float  # kept, and read by a decode step, for all sequences of the batch
    logits_bytes: float  # of a prompt of `context` tokens a sequence, held whole in float32
    shard: dict[str, float]  # of one device: "rows", "head_bytes", "head_flops", "logits_bytes"
    decode: dict[str, Any] | None  # see `_roofline`; None without a chip

    @property
    def head_share_of_flops(self) -> float:
        """Of the forward operations of a token."""
        return self.head_flops / (self.head_flops + self.body_flops)

    @property
    def head_share_of_bytes(self) -> float:
        """Of the bytes that a decode step reads, keys and values included."""
        return self.head_bytes / (self.head_bytes + self.body_bytes + self.kv_bytes)

    @property
    def head_share_of_weights(self) -> float:
        """Of the bytes of parameters that a decode step reads."""
        return self.head_bytes / (self.head_bytes + self.body_bytes)

    def to_dict(self) -> dict[str, Any]:
        """All figures, the shares included, for JSON."""
        shares = {
            "head_share_of_flops": self.head_share_of_flops,
            "head_share_of_bytes": self.head_share_of_bytes,
            "head_share_of_weights": self.head_share_of_weights,
        }
        return {**self._asdict(), "setting": self.setting._asdict(), **shares}


def model_cost(
    model: Architecture,
    setting: Setting,
    chip: Chip | None = None,
    head: dict[str, HeadCost] | None = None,
    parameters: dict[str, int] | None = None,
) -> ModelCost:
    """The cost of a decoder.

    `head` and `parameters` replace those of its linear head: the costs of another head by mode ("training", "scoring",
    "decoding", bytes at `setting.itemsize`) and the numbers by part with it.

    A decode step makes one token of each of `batch` sequences. It reads every parameter but the input table once, and
    the keys and values of `context` tokens a sequence.

    Raises UsageError for a number below 1.

    >>> from headlab.costs import preset
    >>> found = model_cost(preset("gpt2"), Setting(context=1024, itemsize=2))
    >>> found.parameters["total"], f"{found.blocks_by_matrices:.2f}"  # 50257·768 / (12·768²)
    (124439808, '5.45')
    """
    for key, value in setting._asdict().items():
        if value < 1:
            raise UsageError(f"{key} is {value}; it must be at least 1")
    heads = head or {
        mode: model.head_cost(mode, setting.itemsize)
        for mode in ("training", "scoring", "decoding")
    }
    block = model.block_flops(setting.context)
    scoring, decoding = heads["scoring"], heads["decoding"]
    rows = -(-model.vocab_size // setting.shards)
    logits = float(setting.batch * setting.context * model.vocab_size * _LOGIT_BYTES)
    found = ModelCost(
        name=model.name,
        setting=setting,
        parameters=parameters or _parts(model),
        head_flops=scoring.flops_per_token,
        block_flops=block,
        body_flops=model.n_layers * block,
        decode_head_flops=decoding.flops_per_token,
        training_head_flops=heads["training"].flops_per_token,
        blocks_by_matrices=scoring.flops_per_token / (2 * model.block_matrices()),
        blocks_by_shorthand=model.vocab_size / (12 * model.d_model),
        head_bytes=decoding.bytes_read,
        body_bytes=model.body_bytes(setting.itemsize),
        kv_bytes=setting.batch * model.kv_bytes(setting.context, setting.itemsize),
        logits_bytes=logits,
        shard={
            "rows": rows,
            "head_bytes": decoding.bytes_read / setting.shards,
            "head_flops": scoring.flops_per_token / setting.shards,
            "logits_bytes": logits / setting.shards,
        },
        decode=None,
    )
    return found if chip is None else found._replace(decode=_roofline(found, chip))


def _parts(model: Architecture) -> dict[str, int]:
    own = model.parameters()
    return {
        "embedding": own["embedding"] + own["positions"],
        "body": own["blocks"] + own["norm"],
        "head": own["head"],
        "total": own["total"],
    }


def _roofline(cost: ModelCost, chip: Chip) -> dict[str, Any]:
    """The least time of a decode step on one chip, in seconds, by part.

    Each part takes the longer of operations ÷ peak and bytes ÷ bandwidth, one part after another; nothing else (no
    launches, no communication, no sampling) is counted, so that a real step takes longer.
    """
    batch = cost.setting.batch

    def seconds(flops: float, read: float) -> float:
        return max(batch * flops / chip.flops, read / chip.bandwidth)

    head = seconds(cost.decode_head_flops, cost.head_bytes)
    body = seconds(cost.body_flops, cost.body_bytes + cost.kv_bytes)
    needed = cost.parameters["total"] * cost.setting.itemsize + cost.kv_bytes
    return {
        "chip": chip.name,
        "head_seconds": head,
        "body_seconds": body,
        "tokens_per_second": batch / (head + body),
        "head_share": head / (head + body),
        "fits": needed <= chip.memory,
    }
