"""Tables for a reader, on terminals of any width."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from gregale.streams import printable
from gregale.terminal import Console

NARROW = 80  # columns; from here on cells are folded where a table is too wide


def print_table(console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A title and a table; on a narrow terminal, if it does not fit, each row as words under its first cell."""
    console.print(Text(f"\n{printable(title)}"))
    table = _table(headings, rows)
    if _natural_width(console, table) <= console.width or console.width >= NARROW:
        console.print(table)
        return
    for first, *others in rows:
        console.print(Text(printable(first)))
        named = zip(headings[1:], others, strict=True)
        words = "; ".join(f"{heading} {cell}" for heading, cell in named if cell not in ("", "-"))
        console.print(Text(textwrap.indent(textwrap.fill(printable(words), console.width - 2), "  ")))


def fitting(
    console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]], first_to_go: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Headings and rows with as many of the columns as there is room for.

    - `first_to_go`: headings of the columns that may go, in this order
    """
    kept = list(range(len(headings)))
    for heading in (None, *first_to_go):
        kept = [place for place in kept if headings[place] != heading]
        cut = [headings[place] for place in kept], [[row[place] for place in kept] for row in rows]
        if _natural_width(console, _table(*cut)) <= console.width:
            break
    return cut


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table()
    for number, heading in enumerate(headings):
        table.add_column(Text(heading), justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def _natural_width(console: Console, table: Table) -> int:
    return console.measure(table, options=console.options.update(width=10_000)).maximum
