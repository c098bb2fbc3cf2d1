"""Tables for a reader, on terminals of any width."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

NARROW = 80  # columns; from here on cells are folded where a table is too wide


def print_table(console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A title and a table; on a narrow terminal, if it does not fit, each row as words under its first cell."""
    console.print(Text(f"\n{title}"))
    table = Table()
    for number, heading in enumerate(headings):
        table.add_column(Text(heading), justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    natural = console.measure(table, options=console.options.update(width=10_000)).maximum
    if natural <= console.width or console.width >= NARROW:
        console.print(table)
        return
    for first, *others in rows:
        console.print(Text(first))
        named = zip(headings[1:], others, strict=True)
        words = "; ".join(f"{heading} {cell}" for heading, cell in named if cell not in ("", "-"))
        console.print(Text(textwrap.indent(textwrap.fill(words, console.width - 2), "  ")))
