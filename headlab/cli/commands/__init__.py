"""The commands, in the order in which the help lists them. A new one is one file and one line here."""

from headlab.cli.arguments import Command
from headlab.cli.commands import cost, evaluate, options, rank, train

COMMANDS: tuple[Command, ...] = (
    train.COMMAND,
    evaluate.COMMAND,
    rank.COMMAND,
    cost.COMMAND,
    options.COMMAND,
)
