"""The commands, in the order in which the help lists them. A new one is one file and one line here."""

from headlab.cli.arguments import Command
from headlab.cli.commands import cost, evaluate, generate, options, score, train

COMMANDS: tuple[Command, ...] = (
    train.COMMAND,
    evaluate.COMMAND,
    score.COMMAND,
    generate.COMMAND,
    cost.COMMAND,
    options.COMMAND,
)
