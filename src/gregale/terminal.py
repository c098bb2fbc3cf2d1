"""The console of every command: Rich's console with control characters escaped."""

from collections.abc import Iterable
from typing import Any

from rich import console as rich_console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

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
