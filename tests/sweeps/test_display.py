"""What a sweep shows: a table on a terminal, plain lines elsewhere."""

import io

from rich.console import Console

from headlab.sweeps.display import Display
from headlab.sweeps.states import Status

STATUSES = [
    Status("head=tied", "finished", 60, 60, 5.25, 5.5),
    Status("head=[x]", "running", 1500, 6000, 6.125, None, 20_000.0, 61.0),
    Status("seed=1", "failed", 3, 60, error="the loss was not finite"),
]


def shown(terminal):
    file = io.StringIO()
    display = Display(Console(file=file, force_terminal=terminal, width=100), clock=lambda: 0.0)
    display.show(STATUSES)
    display.show(STATUSES)
    display.close()
    return file.getvalue()


def test_a_terminal_shows_a_table_with_state_step_loss_speed_and_time_left():
    text = shown(terminal=True)
    assert "1 finished, 1 running, 1 failed" in text
    for part in ("head=[x]", "1,500/6,000", "6.1250", "20,000", "1:01", "5.5000"):
        assert part in text


def test_elsewhere_each_change_of_state_is_a_plain_line():
    assert shown(terminal=False).splitlines() == [
        "head=tied: finished, step 60/60, loss 5.2500, held-out 5.5000",
        "head=[x]: running, step 1,500/6,000, loss 6.1250, 20,000 tokens/s, ETA 1:01",
        "seed=1: failed, step 3/60, the loss was not finite",
    ]
