"""The commands, in the order in which the help lists them. A new one is one file and one line here."""

from headlab.cli.arguments import Command
from headlab.cli.commands import compare, cost, evaluate, options, rank, report, sweep, train

COMMANDS: tuple[Command, ...] = (
    train.COMMAND,
    sweep.COMMAND,
    evaluate.COMMAND,
    compare.COMMAND,
    report.COMMAND,
    rank.COMMAND,
    cost.COMMAND,
    options.COMMAND,
)
