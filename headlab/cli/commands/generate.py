"""`headlab generate`."""

import argparse

from headlab.cli.arguments import Command, Overrides, add_run, count
from headlab.errors import UsageError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, folders=True)
    parser.add_argument(
        "prompt", metavar="PROMPT", help="the beginning of a document; may be empty"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=count,
        metavar="N",
        help="default: until the model ends the document or its longest sequence is full",
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (default: 1)"
    )
    parser.add_argument("--top-k", type=count, metavar="K", help="only the K most probable tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="only the nucleus of probability P"
    )
    parser.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="only tokens with P times the best one's probability",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="θ",
        help="p to the power of θ for tokens that were there before",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn (0)")
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="ends before it; may be repeated",
    )
    parser.add_argument("--samples", type=count, default=1, metavar="N", help="continuations (1)")
    parser.add_argument("--stream", action="store_true", help="write text as soon as it is there")


def _run(options: argparse.Namespace, overrides: Overrides) -> int:
    del overrides
    if options.stream and options.samples > 1:
        raise UsageError("--stream writes one continuation as it comes; leave --samples out")
    if options.temperature == 0:
        _refuse_what_greedy_ignores(options)
    for text in (options.prompt, *options.stop):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{text!r} is not UTF-8 text") from None
    from headlab.scoring import Rules, generate_text, open_model, stream_text

    model, tokenizer, _ = open_model(options.workdir)
    room = model.max_length - 1 - len(tokenizer.encode(options.prompt))
    asked = {
        "rules": Rules(
            options.temperature,
            options.top_k,
            options.top_p,
            options.min_p,
            options.repetition_penalty,
        ),
        # without room a prompt is refused by its number of tokens
        "max_new_tokens": options.max_new_tokens or max(room, 1),
        "stop": options.stop,
        "seed": options.seed,
    }
    if options.stream:
        pieces = stream_text(model, tokenizer, [options.prompt], **asked)
        print(options.prompt, end="", flush=True)
        for piece in pieces:
            print(piece.text, end="", flush=True)
        print()
        return 0
    [found] = generate_text(model, tokenizer, [options.prompt], samples=options.samples, **asked)
    for number, continuation in enumerate(found, start=1):
        if options.samples > 1:
            print(f"--- {number} of {options.samples} ---")
        print(options.prompt + continuation.text)
    return 0


def _refuse_what_greedy_ignores(options: argparse.Namespace) -> None:
    ignored = [flag for flag in ("top_k", "top_p", "min_p") if getattr(options, flag) is not None]
    ignored += ["samples"] if options.samples > 1 else []
    if ignored:
        raise UsageError(
            f"--temperature=0 always takes the most probable token, so that --{ignored[0].replace('_', '-')} would "
            "change nothing; leave one of them out"
        )


COMMAND = Command(
    name="generate",
    help="text that a run's model puts after a prompt",
    description="""
    Text that a run's model puts after a prompt, which stands at the beginning of a document. The rules are applied in
    this order: repetition penalty, temperature, top-k, top-p, min-p. The same seed draws the same text.
    """,
    examples="""
    headlab generate --workdir=runs/tied "The sea is" --temperature=0
    headlab generate --workdir=runs/tied "The sea is" --top-p=0.9 --samples=3 --seed=1
    headlab generate --workdir=runs/tied "The sea is" --stop=. --stream
    headlab generate --workdir=models/SmolLM2-135M "The sea is" --max-new-tokens=40
    """,
    add_arguments=_add_arguments,
    run=_run,
    repeatable=("--stop",),
)
