"""The console of every command: Rich's console with control characters escaped."""

from collections.abc import Iterable
from typing import Any

from rich import console as rich_console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from gregale.streams import printable


class Console(rich_console.Console):
    """Rich's console without markup and without control characters in texts; Rich controls colours and cursor.

    In a notebook it writes text to its file, as elsewhere. Rich would display HTML there, whatever the file.
    """

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, highlight=False, force_jupyter=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return the segments of a renderable object; Rich also calls this for each part of the object."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text, keep="\n"))
