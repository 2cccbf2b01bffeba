"""HTML of tables and text; whatever comes from a run is escaped here."""

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Column(NamedTuple):
    """A column of a table."""

    title: str
    numeric: bool = True
    words: bool = False  # whether its cells are sentences, which may take several lines
    help: str = ""  # what the title doesn't say


class Cell(NamedTuple):
    """What a cell shows, and what it is sorted by where that is another thing."""

    text: str
    key: float | str | None = None
    title: str = ""  # shown when a pointer rests on it


def text(value: Any) -> str:
    """A value as HTML that shows it as it is."""
    return html.escape(str(value), quote=True)


def json_block(name: str, content: Any) -> str:
    """Data for the page's script; no text in it can end the element or begin another."""
    dumped = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        dumped = dumped.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{name}">{dumped}</script>'


def table(
    caption: str,
    columns: Sequence[Column],
    rows: Iterable[Sequence[Cell]],
    *,
    sortable: bool = False,
    swatches: Sequence[str] = (),
) -> str:
    """A table in a region of its own that scrolls where it is wider than the page.

    The first cell of a row is its heading. `swatches` are ids of groups, whose colour stands by the row.
    """
    heads = "".join(_heading(column, sortable) for column in columns)
    body = []
    for number, row in enumerate(rows):
        swatch = _swatch(swatches[number]) if number < len(swatches) else ""
        cells = [_cell(cell, columns[i], i == 0, swatch) for i, cell in enumerate(row)]
        body.append(f"<tr>{''.join(cells)}</tr>")
    kind = ' class="sortable"' if sortable else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{text(caption)}">'
        f"<table{kind}><caption>{text(caption)}</caption><thead><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def details(summary: str, content: str) -> str:
    """Content that a reader opens."""
    return f"<details><summary>{text(summary)}</summary>{content}</details>"


def section(name: str, title: str, content: str) -> str:
    """A section that its heading labels."""
    return (
        f'<section id="{name}" aria-labelledby="{name}-title">'
        f'<h2 id="{name}-title">{text(title)}</h2>{content}</section>'
    )


def plot(name: str, label: str, caption: str, controls: str = "") -> str:
    """A place for a plot, with its text alternative, what it shows, and its buttons."""
    buttons = (
        f'<div class="controls" role="group" aria-label="{text(label)}: view">{controls}</div>'
        if controls
        else ""
    )
    return (
        f'<figure>{buttons}<div class="plot" id="plot-{name}" role="img" aria-label="{text(label)}">'
        f"</div><figcaption>{text(caption)}</figcaption></figure>"
    )


def button(action: str, label: str, pressed: bool = False) -> str:
    """A button that is on or off, which the page's script answers."""
    return (
        f'<button type="button" data-action="{text(action)}" aria-pressed="{str(pressed).lower()}">'
        f"{text(label)}</button>"
    )


def listing(items: Iterable[str], kind: str) -> str:
    """A list of plain texts; "" where there is none."""
    inner = "".join(f"<li>{text(item)}</li>" for item in items)
    return f'<ul class="{kind}">{inner}</ul>' if inner else ""


def _heading(column: Column, sortable: bool) -> str:
    numeric = ' class="number"' if column.numeric else ""
    title = f' title="{text(column.help)}"' if column.help else ""
    name = text(column.title)
    if sortable:
        name = f'<button type="button" class="sort">{name}<span aria-hidden="true"></span></button>'
    return f'<th scope="col"{numeric}{title}>{name}</th>'


def _cell(cell: Cell, column: Column, first: bool, swatch: str) -> str:
    kind, scope = ("th", ' scope="row"') if first else ("td", "")
    layout = "number" if column.numeric else "words" if column.words else ""
    kind_of = f' class="{layout}"' if layout else ""
    key = "" if cell.key is None else f' data-key="{text(cell.key)}"'
    title = f' title="{text(cell.title)}"' if cell.title else ""
    return (
        f"<{kind}{scope}{kind_of}{key}{title}>{swatch if first else ''}{text(cell.text)}</{kind}>"
    )


def _swatch(group: str) -> str:
    return f'<span class="swatch" data-group="{text(group)}" aria-hidden="true"></span>'
