"""Tables for terminals of any width."""

import textwrap
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from gregale.streams import printable
from gregale.terminal import Console

NARROW = 80  # columns; from this width on, Rich folds the cells of a table that is too wide


def print_table(console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a title and a table; on a narrow terminal, print a table that does not fit as one paragraph per row."""
    console.print(Text(f"\n{printable(title)}"))
    table = _table(headings, rows)
    if _natural_width(console, table) <= console.width or console.width >= NARROW:
        console.print(table)
        return
    for first, *others in rows:
        console.print(Text(printable(first)))
        named = zip(headings[1:], others, strict=True)
        text = "; ".join(f"{heading} {cell}" for heading, cell in named if cell not in ("", "-"))
        console.print(Text(textwrap.indent(textwrap.fill(printable(text), console.width - 2), "  ")))


def fitting(
    console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]], first_to_go: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows with as many columns as fit on the terminal.

    - `first_to_go`: headings of the columns that may be left out, in this order
    """
    kept = list(range(len(headings)))
    for heading in (None, *first_to_go):
        kept = [index for index in kept if headings[index] != heading]
        cut = [headings[index] for index in kept], [[row[index] for index in kept] for row in rows]
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
