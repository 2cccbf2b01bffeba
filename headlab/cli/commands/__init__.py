"""The commands, in the order in which the help lists them.

A new one is one file and one line here, and a row in tests/test_cli_misuse.py of what can be wrong in its command line.
"""

from headlab.cli.arguments import Command
from headlab.cli.commands import (
    compare,
    cost,
    evaluate,
    export,
    generate,
    lm_eval,
    options,
    rank,
    report,
    score,
    sweep,
    train,
)

COMMANDS: tuple[Command, ...] = (
    train.COMMAND,
    sweep.COMMAND,
    evaluate.COMMAND,
    compare.COMMAND,
    report.COMMAND,
    rank.COMMAND,
    score.COMMAND,
    generate.COMMAND,
    lm_eval.COMMAND,
    export.COMMAND,
    cost.COMMAND,
    options.COMMAND,
)
