"""`headlab lm-eval`."""

import argparse

from headlab.cli.arguments import Command, Overrides
from headlab.errors import UsageError


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs="*", metavar="…", help="arguments of lm_eval")


def _run(options: argparse.Namespace, overrides: Overrides) -> int:
    del overrides
    try:
        from headlab.scoring.lm_eval import main
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] != "lm_eval":
            raise
        raise UsageError(
            "lm-evaluation-harness is not installed; install headlab with it: pip install 'headlab[lm_eval]'"
        ) from None
    main(options.arguments)
    return 0


COMMAND = Command(
    name="lm-eval",
    help="run EleutherAI's lm-evaluation-harness on a run: lm_eval that knows --model headlab",
    description="""
    The command lm_eval of EleutherAI's lm-evaluation-harness, which takes all arguments, with the model "headlab" known
    to it. --model_args has workdir=RUN, a run directory or a Hugging Face folder, and may have batch_size, max_length,
    max_gen_toks, step, add_bos_token, shards and seed.
    """,
    examples="""
    headlab lm-eval --model headlab --model_args workdir=runs/tied --tasks arc_easy --batch_size 16
    headlab lm-eval --model headlab --model_args workdir=runs/tied,step=best --tasks mine --include_path tasks
    headlab lm-eval run --help
    headlab lm-eval ls tasks
    """,
    add_arguments=_add_arguments,
    run=_run,
    hands_on=True,
)
