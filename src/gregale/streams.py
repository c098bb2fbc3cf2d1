"""Text streams whose end is no reason to end."""

import os
from contextlib import suppress
from typing import Any, TextIO


def abandon(stream: TextIO) -> None:
    """Lets a stream that cannot be written lead nowhere, so that what is still in it cannot fail at Python's exit."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class LastingStream:
    """A text stream that falls silent when its terminal is closed, its reader has ended or its disk is full."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes a text, if anybody is there to read it."""
        try:
            return self._stream.write(text)
        except OSError:
            abandon(self._stream)
            return len(text)

    def flush(self) -> None:
        """Hands on what was written, likewise."""
        try:
            self._stream.flush()
        except OSError:
            abandon(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
