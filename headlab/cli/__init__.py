"""The command `headlab`: reads the command line, calls the library, says plainly what went wrong.

Nothing heavy is imported before a command needs it, so that --help answers at once.
"""

from headlab.cli.arguments import Command, Parser, count, split_overrides
from headlab.cli.entry import main
from headlab.cli.failures import guarded

__all__ = ["Command", "Parser", "count", "guarded", "main", "split_overrides"]
