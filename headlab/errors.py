"""The two kinds of error that headlab raises on purpose; the command line prints each as one paragraph."""

import difflib
from collections.abc import Iterable


class HeadlabError(Exception):
    """Work that was rightly asked for failed: the message says what happened and what is intact (exit code 1)."""

    exit_code = 1


class UsageError(HeadlabError, ValueError):
    """What was asked for cannot be done: the message names the value, the range and the fix (exit code 2)."""

    exit_code = 2


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name most like this one, for messages about a name that was misspelt.

    >>> nearest("teid", ["untied", "tied"])
    'tied'
    """
    return max(known, key=lambda other: difflib.SequenceMatcher(None, name, other).ratio())
