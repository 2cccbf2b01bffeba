"""`headlab score`."""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from headlab import files
from headlab.cli.arguments import Command, Overrides, add_run, count
from headlab.cli.tables import number, print_table
from headlab.errors import UsageError

_LONGEST_TABLE = 200  # tokens of which each gets a line


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, folders=True)
    parser.add_argument(
        "file", metavar="FILE", help="a UTF-8 text, one document; - is standard input"
    )
    parser.add_argument(
        "--top", type=int, default=0, metavar="K", help="list the K most probable tokens, too (0)"
    )
    parser.add_argument(
        "--stride",
        type=count,
        metavar="N",
        help="tokens between the windows of a long text (default: half the model's longest)",
    )
    parser.add_argument(
        "--batch-size", type=count, default=8, metavar="N", help="windows at once (8)"
    )
    parser.add_argument(
        "--shards",
        type=count,
        default=1,
        metavar="N",
        help="devices that share the rows of the vocabulary (1)",
    )
    parser.add_argument("--json", action="store_true", help="print all as JSON in place of tables")


def _run(options: argparse.Namespace, overrides: Overrides) -> int:
    del overrides
    text = _text(options.file)
    from headlab import sharding
    from headlab.pretrained import restore
    from headlab.scoring import default_stride, score, total_log_prob

    mesh = sharding.make_mesh(1, options.shards)
    model, head, tokenizer, _, step = restore(options.workdir, shards=options.shards)
    [scores] = score(
        model,
        [tokenizer.encode(text)],
        top=options.top,
        prefix=[tokenizer.start_id],
        stride=options.stride,
        batch_size=options.batch_size,
        mesh=mesh,
        progress=True,
    )
    result = {
        "run": str(options.workdir),
        "step": step,
        "head": head,
        "file": options.file,
        "stride": options.stride or default_stride(model.max_length),
        "max_length": model.max_length,
        **_totals(-total_log_prob(scores), len(scores), len(text.encode())),
    }
    if options.json:
        listed = [_record(token, tokenizer) for token in scores]
        print(json.dumps({**result, "scores": listed}, ensure_ascii=False))
        return 0
    if len(scores) <= _LONGEST_TABLE:
        _print_tokens(scores, tokenizer, options.top)
    rows = [(name.replace("_", " "), number(value)) for name, value in result.items()]
    print_table(f"{options.file} by {options.workdir}", rows)
    if len(scores) > _LONGEST_TABLE:
        print(f"Up to {_LONGEST_TABLE} tokens are listed one by one; --json lists any number.")
    return 0


def _text(name: str) -> str:
    """The text of a file as it is, line ends too."""
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        text = content.decode()
    except OSError as problem:
        near = None if Path(name).exists() else files.similar(Path(name), Path.is_file)
        fix = "give a text file" if near is None else f"did you mean {near}?"
        raise UsageError(f"cannot read {name} ({problem.strerror}); {fix}") from None
    except UnicodeDecodeError as problem:
        raise UsageError(
            f"{name} is not UTF-8 text: byte {problem.start} is 0x{content[problem.start]:02x}; convert it first"
        ) from None
    if not text:
        raise UsageError(f"{name} is empty; give a text of at least one character")
    return text


def _totals(nats: float, tokens: int, size: int) -> dict[str, Any]:
    """Of the text's tokens; the separator before it is given, and none is predicted after it."""
    return {
        "tokens": tokens,
        "bytes": size,
        "nats": nats,
        "nats_per_token": nats / tokens,
        "bits_per_byte": nats / math.log(2) / size,
        "perplexity": math.exp(nats / tokens),
    }


def _record(token: Any, tokenizer: Any) -> dict[str, Any]:
    """One token; "text" shows part of a character as U+FFFD, and "bytes" is exact where tokens are bytes."""
    record = token._asdict() | {
        "text": tokenizer.decode([token.id]),
        "top": [
            {"id": id_, "text": tokenizer.decode([id_]), "log_prob": log_prob}
            for id_, log_prob in token.top
        ],
    }
    return record | (
        {"bytes": tokenizer.token_bytes(token.id).hex()} if tokenizer.byte_level else {}
    )


def _print_tokens(scores: list[Any], tokenizer: Any, top: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, caption="log p and entropy in nats; context in tokens")
    table.add_column("token", overflow="fold")
    for name in ("log p", "rank", "entropy", "context"):
        table.add_column(name, justify="right")
    if top:
        table.add_column("most probable (log p)", overflow="fold")
    for token in scores:
        row = [
            repr(tokenizer.decode([token.id])),
            f"{token.log_prob:.4f}",
            f"{token.rank:,}",
            f"{token.entropy:.4f}",
            f"{token.context:,}",
        ]
        if top:
            best = (f"{tokenizer.decode([i])!r} {p:.3f}" for i, p in token.top)
            row.append("  ".join(best))
        table.add_row(*map(Text, row))
    Console(file=sys.stdout).print(table)


COMMAND = Command(
    name="score",
    help="log-probability, rank and entropy of each token of a text",
    description="""
    What a run's model says of a text that stands at the beginning of a document: nats, bits per byte and perplexity,
    and of each token its log-probability, rank and the entropy of the distribution. Texts longer than the model are
    scored in windows: each token once, after at least (longest − stride) tokens.
    """,
    examples="""
    headlab score --workdir=runs/tied text.txt
    headlab score --workdir=runs/tied text.txt --top=5
    headlab score --workdir=runs/sharded text.txt --shards=4
    headlab score --workdir=runs/tied book.txt --stride=32 --json > scores.json
    headlab score --workdir=models/SmolLM2-135M text.txt
    """,
    add_arguments=_add_arguments,
    run=_run,
)
