"""The two kinds of error that headlab raises on purpose; the command line prints each as one paragraph."""


class HeadlabError(Exception):
    """Work that was rightly asked for failed: the message says what happened and what is intact (exit code 1)."""

    exit_code = 1


class UsageError(HeadlabError, ValueError):
    """What was asked for cannot be done: the message names the value, the range and the fix (exit code 2)."""

    exit_code = 2
