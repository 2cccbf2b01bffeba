"""What a sweep shows while it runs: a live table on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from headlab.data.progress import duration
from headlab.sweeps.states import FAILED, RUNNING, STARTING, Status, tally

_PLAIN_EVERY = 30.0  # seconds between plain lines about what is running


class Display:
    """Shows the statuses of all points, on standard error, whenever they are given."""

    def __init__(self, console: Any = None, clock: Callable[[], float] = time.monotonic):
        from rich.console import Console

        self._console = console or Console(file=sys.stderr)
        self._clock = clock
        self._live: Any = None
        self._states: dict[str, str] = {}
        self._last_plain = clock()
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(
                console=self._console, auto_refresh=False, vertical_overflow="ellipsis"
            )
            self._live.start()

    def show(self, statuses: Sequence[Status]) -> None:
        """Shows these, all points of the sweep in order."""
        if self._live is not None:
            self._live.update(table(statuses), refresh=True)
            return
        for status in statuses:
            if self._states.get(status.name) != status.state:
                self._states[status.name] = status.state
                self.say(_line(status))
        if self._clock() - self._last_plain >= _PLAIN_EVERY:
            self._last_plain = self._clock()
            self.say(tally(statuses))
            for status in statuses:
                if status.state == RUNNING:
                    self.say(_line(status))

    def say(self, message: str) -> None:
        """Prints a line, above the live table."""
        # as it is: neither colours, nor [markup], nor lines broken at the width of a pipe
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leaves the last state in the terminal."""
        if self._live is not None:
            self._live.stop()


def table(statuses: Sequence[Status]) -> Any:
    """A rich table of statuses."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(title=tally(statuses), title_justify="left", box=box.SIMPLE_HEAD)
    made.add_column("point", overflow="fold")
    for name in ("state", "step", "loss", "held-out", "tokens/s", "ETA"):
        made.add_column(name, justify="left" if name == "state" else "right")
    for status in statuses:
        made.add_row(*map(Text, (status.name, status.state, *_numbers(status))))
    return made


def _numbers(status: Status) -> tuple[str, ...]:
    return (
        f"{status.step:,}/{status.steps:,}",
        "" if status.loss is None else f"{status.loss:.4f}",
        "" if status.held_out is None else f"{status.held_out:.4f}",
        "" if status.tokens_per_second is None else f"{status.tokens_per_second:,.0f}",
        "" if status.seconds_left is None else duration(status.seconds_left),
    )


def _line(status: Status) -> str:
    step, loss, held_out, speed, left = _numbers(status)
    parts = [
        status.state,
        f"step {step}" if status.step else "",
        loss and f"loss {loss}",
        held_out and f"held-out {held_out}",
        speed and f"{speed} tokens/s",
        left and f"ETA {left}",
        status.error or "" if status.state == FAILED else "",
    ]
    if status.state == STARTING:
        parts = parts[:1]
    return f"{status.name}: {', '.join(part for part in parts if part)}"
