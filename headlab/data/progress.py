"""Progress of long preparations, shown on standard error where that is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def track(
    items: Iterable[T], description: str, *, total: int | None, enabled: bool = True
) -> Iterator[T]:
    """Yield `items`, showing how many of `total` (None: unknown) have passed and the time left."""
    if not (enabled and sys.stderr.isatty()):
        yield from items
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(elapsed_when_finished=True),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=total)
        for item in items:
            yield item
            bar.advance(task)


@contextlib.contextmanager
def status(description: str, *, enabled: bool = True) -> Iterator[None]:
    """Show that something of unknown length is under way, for as long as the block runs."""
    if not (enabled and sys.stderr.isatty()):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(description):
        yield


def duration(seconds: float) -> str:
    """Minutes and seconds, with hours where there are some.

    >>> duration(75), duration(3675)
    ('1:15', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
