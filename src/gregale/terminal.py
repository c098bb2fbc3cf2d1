"""The console of every command: Rich's, which shows text and never lets the terminal act upon it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import console as rich_console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from gregale.streams import printable


class Console(rich_console.Console):
    """Rich's console without markup in texts and without their control characters; colours and cursor are Rich's."""

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return the segments of anything that can be shown; Rich calls it for every part of that too."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text, keep="\n"))
