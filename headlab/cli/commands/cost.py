"""`headlab cost`."""

import argparse
import json
from typing import Any

from headlab.cli.arguments import Command, Overrides, count, one_of, path
from headlab.cli.tables import print_table
from headlab.errors import UsageError

_ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--config", type=path, metavar="FILE", help="the model of a config file, FILE.py[:TEXT]"
    )
    what.add_argument("--model", metavar="NAME", help="a published model, such as gemma-2-2b")
    what.add_argument(
        "--hf", type=path, metavar="FOLDER", help="a folder in the Hugging Face layout"
    )
    what.add_argument("--all", action="store_true", help="every published model, one a row")
    parser.add_argument(
        "--against", metavar="NAME", help="a published model to compare a decode step with"
    )
    parser.add_argument("--chip", metavar="NAME", help="for a roofline, such as h100 or tpu-v5e")
    parser.add_argument(
        "--tokens", type=count, metavar="T", help="of a prompt, and of a decode "
        "step's context (default: 1024, or as many as the model has positions for)"
    )  # fmt: skip
    parser.add_argument("--batch", type=count, default=1, metavar="N", help="sequences (1)")
    parser.add_argument(
        "--dtype",
        **one_of(*_ITEMSIZES),
        default="bfloat16",
        help="of parameters (default: bfloat16)",
    )
    parser.add_argument(
        "--shards", type=count, default=1, metavar="N", help="of the vocabulary (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")


def _run(options: argparse.Namespace, overrides: Overrides) -> int:
    from headlab import costs

    if overrides and not options.config:
        raise UsageError("--config.KEY=VALUE changes a config file: give one with --config=FILE")
    if options.all and options.against:
        raise UsageError(
            "--all lists every model by itself; leave --against out, or name one --model"
        )
    chip = costs.chip(options.chip) if options.chip else None
    other = costs.preset(options.against) if options.against else None
    models = list(costs.PRESETS.values()) if options.all else []
    if options.model or options.hf:
        models = [
            costs.preset(options.model) if options.model else costs.read_architecture(options.hf)
        ]
    found = []
    if options.config:
        from headlab.config import load
        from headlab.models.cost import architecture, config_cost

        config = load(options.config, overrides)
        name = f"{options.config}, {config.head.name}"
        setting = _setting(options, architecture(config, name))
        found.append(config_cost(config, name, setting, chip))
    models += [other] if other else []
    found += [costs.model_cost(model, _setting(options, model), chip) for model in models]
    if options.json:
        print(json.dumps([cost.to_dict() for cost in found], indent=2))
    elif options.all:
        _print_all(found)
    else:
        for cost in found:
            print_table(cost.name, _rows(cost))
        if other is not None:
            _print_comparison(*found)
    return 0


def _setting(options: argparse.Namespace, model: Any) -> Any:
    """What is asked of one model; without --tokens a context that it has positions for."""
    from headlab.costs import Setting

    longest = model.learned_positions or options.tokens or 1024
    context = options.tokens or min(1024, longest)
    if context > longest:
        raise UsageError(
            f"--tokens={context}: {model.name} has positions for {longest} tokens; ask for at most so many"
        )
    return Setting(context, options.batch, _ITEMSIZES[options.dtype], options.shards)


def _rows(cost: Any) -> list[tuple[str, str]]:
    setting, parts = cost.setting, cost.parameters
    rows = [
        ("parameters", f"{parts['total']:,}"),
        *((f"  {part}", f"{parts[part]:,}") for part in ("embedding", "body", "head")),
        ("FLOPs a token, forward", _si(cost.head_flops + cost.body_flops)),
        ("  head", f"{_si(cost.head_flops)}, {cost.head_share_of_flops:.1%}"),
        (f"  one block, at {setting.context:,} tokens", _si(cost.block_flops)),
        ("FLOPs of the head a token in training", _si(cost.training_head_flops)),
        ("blocks that the head equals, by its own matrices", f"{cost.blocks_by_matrices:.2f}"),
        ("  by the shorthand 2·d·V over 24·d²", f"{cost.blocks_by_shorthand:.2f}"),
        ("bytes that a decode step reads", _bytes(cost.head_bytes + cost.body_bytes + cost.kv_bytes)),
        ("  head", f"{_bytes(cost.head_bytes)}, {cost.head_share_of_bytes:.1%}"),
        ("  head, of the parameters alone", f"{cost.head_share_of_weights:.1%}"),
        (
            f"  keys and values of {setting.batch:,} × {setting.context:,} tokens",
            _bytes(cost.kv_bytes),
        ),
        (
            f"float32 logits of a prompt of {setting.batch:,} × {setting.context:,} tokens",
            _bytes(cost.logits_bytes),
        ),
    ]  # fmt: skip
    if setting.shards > 1:
        shard = cost.shard
        rows += [
            (f"rows of one of {setting.shards} shards", f"{shard['rows']:,}"),
            ("  bytes of the head", _bytes(shard["head_bytes"])),
            ("  FLOPs of the head a token", _si(shard["head_flops"])),
            ("  logits of the prompt", _bytes(shard["logits_bytes"])),
        ]
    if cost.decode is not None:
        decode = cost.decode
        step = decode["head_seconds"] + decode["body_seconds"]
        rows += [
            (f"decode step on {decode['chip']}, at least", f"{step * 1e3:.3f} ms"),
            ("  head", f"{decode['head_seconds'] * 1e3:.3f} ms, {decode['head_share']:.1%}"),
            ("  tokens a second, at most", f"{decode['tokens_per_second']:,.0f}"),
            ("  assumed", "the longer of FLOPs ÷ peak and bytes ÷ bandwidth; nothing else"),
        ]
        if not decode["fits"]:
            rows.append(("  memory", f"does not fit in {decode['chip']}"))
    return rows


def _print_all(found: list[Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        caption="blocks: that the head equals by its matrices; 2dV/24d²: by shorthand",
    )
    timed = found[0].decode is not None
    table.add_column("model", no_wrap=True)
    for column in ("parameters", "blocks", "2dV/24d²", "of weights", "of FLOPs"):
        table.add_column(column, justify="right", overflow="fold")
    for column in ("decode step", "head") if timed else ():
        table.add_column(column, justify="right")
    for cost in found:
        row = [
            cost.name,
            _si(cost.parameters["total"]),
            f"{cost.blocks_by_matrices:.2f}",
            f"{cost.blocks_by_shorthand:.2f}",
            f"{cost.head_share_of_weights:.1%}",
            f"{cost.head_share_of_flops:.1%}",
        ]
        if timed:
            step = cost.decode["head_seconds"] + cost.decode["body_seconds"]
            row += [f"{step * 1e3:.3f} ms", f"{cost.decode['head_share']:.1%}"]
        table.add_row(*row)
    Console().print(table)


def _print_comparison(one: Any, other: Any) -> None:
    """How much faster one decodes, and what it would be without the heads."""

    def read(cost: Any, head: bool) -> float:
        return cost.body_bytes + cost.kv_bytes + (cost.head_bytes if head else 0)

    rows = [
        ("parameters, ratio", f"{other.parameters['total'] / one.parameters['total']:.2f}"),
        ("bytes of a decode step, ratio", f"{read(other, True) / read(one, True):.2f}"),
        ("  without either head", f"{read(other, False) / read(one, False):.2f}"),
    ]
    if one.decode is not None:

        def step(cost: Any, head: bool) -> float:
            return cost.decode["body_seconds"] + (cost.decode["head_seconds"] if head else 0)

        rows += [
            ("least time of a decode step, ratio", f"{step(other, True) / step(one, True):.2f}"),
            ("  without either head", f"{step(other, False) / step(one, False):.2f}"),
        ]
    print_table(f"{other.name} over {one.name}", rows)


def _si(value: float) -> str:
    """A number with three digits and k, M, G or T."""
    for unit in ("", "k", "M", "G"):
        if abs(value) < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:,.3g}T" if value < 1000 else f"{value:,.0f}T"


def _bytes(value: float) -> str:
    """Bytes in decimal units."""
    return _si(value) + "B"


COMMAND = Command(
    name="cost",
    help="parameters, FLOPs, bytes and the least decode time of a model, and the head's share",
    description="""
    What a model costs before anything is trained, and how much of it is the head.
    KV are the keys and values, logits those of a whole prompt held in float32.
    """,
    examples="""
    headlab cost --model=gemma-2-2b --chip=h100
    headlab cost --model=gemma-2-2b --against=llama-2-7b --chip=h100
    headlab cost --config=configs/micro.py --config.head.name=adaptive
    headlab cost --hf=models/my-llama --tokens=8192 --shards=8
    headlab cost --all
    """,
    add_arguments=_add_arguments,
    run=_run,
    takes_overrides=True,
)
