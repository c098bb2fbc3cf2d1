"""The console of every command: Rich's console with control characters escaped, and tables of any width."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from rich import console as rich_console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from gregale.streams import printable

UNWRAPPED = 100_000  # columns


class Console(rich_console.Console):
    """Rich's console without markup and without control characters in texts; Rich controls colours and cursor.

    In a notebook it writes text to its file, as elsewhere. Rich would display HTML there, whatever the file. Without a
    terminal it wraps no line, because another program or a file takes the text.
    """

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, highlight=False, force_jupyter=False, **options)
        if not self.is_terminal and "width" not in options:
            self.width = UNWRAPPED

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return the segments of a renderable object; Rich also calls this for each part of the object."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text, keep="\n"))


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
