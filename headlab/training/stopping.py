"""Signals that ask a run to stop when its step is done."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headlab.errors import HeadlabError


class Interrupted(HeadlabError):
    """A signal asked the run to stop; it saved a checkpoint first. The exit code is 128 + the signal."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.exit_code = 128 + signal_number


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that the first SIGTERM or SIGINT enters; the second one acts as ever."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    previous: dict[int, Any] = {}

    def handle(number, frame):
        received.append(number)
        signal.signal(number, previous[number])
        print(
            f"\n{signal.Signals(number).name}: finishing this step and saving; once more stops at once.",
            file=sys.stderr,
        )

    for kind in (signal.SIGTERM, signal.SIGINT):
        previous[kind] = signal.signal(kind, handle)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
