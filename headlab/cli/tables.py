"""Results as a table in the terminal."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping | list | tuple):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree, start=1)
        for key, value in items:
            yield from leaves(value, f"{name} {key}".strip().replace("_", " "))
    else:
        yield name, tree


def number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def print_table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("quantity", overflow="fold")
    table.add_column("value", justify="right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # Text, for brackets in a name are no markup
    Console(file=sys.stdout).print(table)
