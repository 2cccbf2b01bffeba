"""What must hold before any work begins: known keys, types, ranges, and rules across keys."""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict, FrozenConfigDict

from headlab.config.options import OPTIONS, REQUIRED, Option, interval_in_words, within
from headlab.config.tree import flatten, freeze, nearest, unknown_key
from headlab.config.values import as_text, conform, type_in_words
from headlab.errors import UsageError

BYTE_LEVEL_MINIMUM = 257  # 256 bytes and the separator of documents


def resolve(config: ConfigDict) -> FrozenConfigDict:
    """The complete, checked and frozen configuration: what a run records and computes.

    Missing options take their defaults, the chosen head's own options those of its class, and the
    values that are None because they follow from others (`n_kv_heads`, `d_mlp`, `warmup_steps`) are
    filled in. To change a value, change the configuration that was resolved, and resolve it again.

    Raises:
      UsageError: a key, a type or a value that cannot be; the message names it, what is allowed and
        the fix.
    """
    given = flatten(config)
    head = given.get("head.name", OPTIONS["head.name"].default)
    options = OPTIONS | head_options(head)
    for key in given:
        if key not in options:
            raise misplaced(key, head, options)
    values = {}
    for key, option in options.items():
        value = given.get(key, option.default)
        if value is REQUIRED:
            raise UsageError(
                f"{key} is missing: the head {head!r} needs it; "
                f"set --config.{key} to {type_in_words(option.type)}"
            )
        values[key] = checked(key, value, option)
    _fill_in(values)
    _check_head(values)
    _check_model(values)
    _check_training(values)
    _check_mesh(values)
    return freeze(values)


def replace(config: ConfigDict, values: Mapping[str, Any]) -> FrozenConfigDict:
    """A resolved configuration with these values by dotted key in place of its own, resolved again.

    Raises:
      UsageError: a key or a value that cannot be.
    """
    return resolve(freeze({**flatten(config), **values}))


def untie_step(config: ConfigDict) -> int | None:
    """The steps trained tied before the head is untied: round(untie_at · steps), or None."""
    share = config.head.untie_at
    return None if share is None else round(share * config.train.steps)


class Biases(NamedTuple):
    """Which projections of a decoder's blocks have a bias."""

    qkv: bool
    output: bool  # of the attention
    mlp: bool


def biases(model: Any) -> Biases:
    """Those of the `model` part of a config: of all with `model.bias`, else as their own options say."""
    return Biases(
        model.bias or model.qkv_bias, model.bias or model.output_bias, model.bias or model.mlp_bias
    )


def head_width(model: Any) -> int:
    """The width of an attention head, for the `model` part of a config."""
    return model.d_head or model.d_model // model.n_heads


def head_options(name: str) -> dict[str, Option]:
    """The options that belong to one head alone, by dotted key, as its class declares them.

    Raises:
      UsageError: no head has this name.
    """
    # heads bring JAX with them, which describing or reading a configuration does not need
    heads = importlib.import_module("headlab.heads")
    names = tuple(heads.names())
    if name not in names:
        raise UsageError(
            f"head.name={as_text(name)} is not a head; did you mean {nearest(str(name), names)}? "
            f"The heads are {', '.join(sorted(names))}"
        )
    return {
        f"head.{parameter.name}": Option(
            REQUIRED if parameter.default is inspect.Parameter.empty else parameter.default,
            parameter.annotation,
            f"option of the head {name}",
        )
        for parameter in heads.options(name).values()
        if f"head.{parameter.name}" not in OPTIONS
    }


def checked(key: str, value: Any, option: Option) -> Any:
    """The value in the option's type.

    Raises:
      UsageError: its type or its range is wrong.
    """
    try:
        value = conform(value, option.type)
    except ValueError as problem:
        raise refused(key, value, option, str(problem)) from None
    if option.allowed and value is not None and not within(value, option.allowed):
        raise refused(key, value, option, f"it must be {interval_in_words(option.allowed)}")
    return value


def refused(key: str, value: Any, option: Option, reason: str) -> UsageError:
    """The error for a value that an option cannot have."""
    shown = repr(value) if isinstance(value, str) else as_text(value)
    default = "" if option.default is REQUIRED else f" (default {as_text(option.default)})"
    return UsageError(
        f"{key}={shown} is not allowed: {reason}{default}; set it with --config.{key}=VALUE"
    )


def misplaced(key: str, head: str, options: Mapping[str, Option]) -> UsageError:
    """The error for a key that is no option here, though it may be one of another head."""
    if not key.startswith("head."):
        return unknown_key(key, options)
    heads = importlib.import_module("headlab.heads")
    owners = [name for name in heads.names() if key.removeprefix("head.") in heads.options(name)]
    if owners:
        return UsageError(
            f"{key} is not an option of the head {head!r} but of {', '.join(owners)}; remove it or "
            f"set --config.head.name={owners[0]}"
        )
    own = [other for other in options if other.startswith("head.")]
    return UsageError(
        f"{key} is not an option of the head {head!r}; did you mean {nearest(key, own)}? "
        f"It has {', '.join(own)}"
    )


def _fill_in(values: dict[str, Any]) -> None:
    d_model = values["model.d_model"]
    if values["model.n_kv_heads"] is None:
        values["model.n_kv_heads"] = values["model.n_heads"]
    if values["model.d_mlp"] is None:
        # swiglu has three matrices in place of two, so 8/3 keeps the parameters of 4 d_model; the
        # next multiple of 8 suits matrix units
        swiglu = values["model.activation"] == "swiglu"
        values["model.d_mlp"] = 8 * -(-d_model // 3) if swiglu else 4 * d_model
    if values["optimizer.warmup_steps"] is None:
        values["optimizer.warmup_steps"] = values["train.steps"] // 20


def _check_head(values: Mapping[str, Any]) -> None:
    share, steps = values["head.untie_at"], values["train.steps"]
    if share is None:
        return
    if values["head.name"] != "tied":
        raise UsageError(
            f"head.untie_at={share} needs a head that begins tied, not {values['head.name']!r}; "
            "set --config.head.name=tied or --config.head.untie_at=none"
        )
    if not 0 < round(share * steps) < steps:
        raise UsageError(
            f"head.untie_at={share} of {steps} steps is step {round(share * steps)}, but at least "
            f"one step must come before it and one after, so it must lie in (0, {steps}); choose "
            "another --config.head.untie_at or more --config.train.steps"
        )


def _check_model(values: Mapping[str, Any]) -> None:
    d_model, n_heads = values["model.d_model"], values["model.n_heads"]
    d_head = values["model.d_head"]
    if d_head is None and d_model % n_heads:
        raise UsageError(
            f"model.n_heads={n_heads} does not divide model.d_model={d_model}; "
            f"set --config.model.n_heads to one of {_divisors(d_model)}, or --config.model.d_head"
        )
    n_kv_heads = values["model.n_kv_heads"]
    if n_heads % n_kv_heads:
        raise UsageError(
            f"model.n_kv_heads={n_kv_heads} does not divide model.n_heads={n_heads}; "
            f"set --config.model.n_kv_heads to one of {_divisors(n_heads)}"
        )
    rotary = values["model.position"] == "rotary"
    if rotary and (d_head or d_model // n_heads) % 2:
        given = (
            f"model.d_head={d_head} is odd; change it"
            if d_head
            else f"model.d_model={d_model} over model.n_heads={n_heads} gives each head an odd width of "
            f"{d_model // n_heads}; change one of the two"
        )
        raise UsageError(
            f"model.position=rotary turns pairs of features, but {given} or set "
            "--config.model.position=learned"
        )
    _check_rope_scaling(values["model.rope_scaling"], rotary)
    seq_len, max_length = values["data.seq_len"], values["model.max_length"]
    if seq_len > max_length:
        what = "the longest sequence that the model takes" if rotary else "learned positions"
        raise UsageError(
            f"data.seq_len={seq_len} is longer than model.max_length={max_length}, {what}; set "
            f"--config.data.seq_len to at most {max_length} or --config.model.max_length={seq_len}"
        )


def _check_rope_scaling(scaling: tuple[float, ...] | None, rotary: bool) -> None:
    if scaling is None:
        return
    if not rotary:
        raise UsageError(
            f"model.rope_scaling={as_text(scaling)} is of rotary positions; set --config.model.position=rotary or "
            "--config.model.rope_scaling=none"
        )
    factor, low, high, length = scaling
    if not (factor >= 1 and 0 < low < high and length >= 1):
        raise UsageError(
            f"model.rope_scaling={as_text(scaling)} is not allowed: of (factor, low, high, original length) the factor "
            "must be at least 1, 0 < low < high, and the length at least 1; Llama 3.1 has (8,1,4,8192)"
        )


def _check_training(values: Mapping[str, Any]) -> None:
    vocab_size = values["data.vocab_size"]
    if values["data.tokenizer"] is None and vocab_size < BYTE_LEVEL_MINIMUM:
        raise UsageError(
            f"data.vocab_size={vocab_size} is too small for a byte-level tokenizer, which needs at "
            f"least {BYTE_LEVEL_MINIMUM}: 256 bytes and a separator; set a larger "
            "--config.data.vocab_size or give a tokenizer.json with --config.data.tokenizer"
        )
    _check_batches(values, max(values["mesh.data"], 1))
    warmup, steps = values["optimizer.warmup_steps"], values["train.steps"]
    if warmup >= steps:
        raise UsageError(
            f"optimizer.warmup_steps={warmup} leaves none of the train.steps={steps} steps at the "
            f"peak rate; set --config.optimizer.warmup_steps to at most {steps - 1}"
        )


def _check_batches(values: Mapping[str, Any], devices: int) -> None:
    """Raises UsageError unless batches divide evenly over so many devices; `values` by dotted key."""
    parts = values["train.micro_batches"]
    if values["train.batch_size"] % (devices * parts):
        raise UsageError(
            f"train.batch_size={values['train.batch_size']} is not a multiple of "
            f"mesh.data={devices} devices times train.micro_batches={parts}; set "
            f"--config.train.batch_size to a multiple of {devices * parts}"
        )
    if values["eval.batch_size"] % devices:
        raise UsageError(
            f"eval.batch_size={values['eval.batch_size']} is not a multiple of mesh.data={devices} "
            f"devices; set --config.eval.batch_size to a multiple of {devices}"
        )


def _check_mesh(values: Mapping[str, Any]) -> None:
    data, vocab = values["mesh.data"], values["mesh.vocab"]
    for key in ("mesh.data", "mesh.vocab"):
        if values[key] == 0:
            raise refused(key, 0, OPTIONS[key], "it must be at least 1, or -1 for the rest")
    if data == vocab == -1:
        raise UsageError(
            "mesh.data=-1 and mesh.vocab=-1 both stand for the rest of the devices; set one of them to a number"
        )
    if values["head.sum_order"] == "fast":
        return
    if data != 1 or values["mesh.fsdp"]:
        raise UsageError(
            f"head.sum_order=invariant promises the same bits for one batch on one device along data, not with "
            f"mesh.data={data} and mesh.fsdp={values['mesh.fsdp']}; set --config.mesh.data=1 "
            "--config.mesh.fsdp=false, or --config.head.sum_order=fast"
        )
    blocks, multiple = values["head.sum_blocks"], values["head.vocab_multiple"]
    if blocks & (blocks - 1):
        raise UsageError(
            f"head.sum_blocks={blocks} is not a power of two, which a balanced tree of sums needs; set "
            f"--config.head.sum_blocks={1 << (blocks.bit_length() - 1)}"
        )
    if multiple % blocks:
        raise UsageError(
            f"head.sum_blocks={blocks} does not divide head.vocab_multiple={multiple}, so that the rows do not make "
            f"equal blocks; set --config.head.vocab_multiple={-(-multiple // blocks) * blocks}"
        )
    _check_blocks(blocks, max(vocab, 1))


def check_mesh(config: ConfigDict, shape: Mapping[str, int]) -> None:
    """Raises UsageError where a resolved configuration does not fit the mesh {"data": …, "vocab": …} that -1 gave."""
    values = {**flatten(config), **{f"mesh.{axis}": size for axis, size in shape.items()}}
    _check_batches(values, values["mesh.data"])
    _check_mesh(values)


def _check_blocks(blocks: int, shards: int) -> None:
    """Raises UsageError unless the shards of the vocabulary divide the blocks of the invariant order."""
    if blocks % shards:
        fitting = max(n for n in range(1, shards + 1) if blocks % n == 0)
        raise UsageError(
            f"head.sum_blocks={blocks} is not a multiple of mesh.vocab={shards}; with "
            f"head.sum_order=invariant a shard holds whole blocks: set --config.mesh.vocab={fitting}, or "
            f"--config.head.sum_blocks to a power of two that {shards} divides"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(part) for part in range(1, number + 1) if number % part == 0)
