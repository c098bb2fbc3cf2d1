"""Text streams: text that a terminal shows and does not act upon, and streams whose end is no reason to end."""

import os
import unicodedata
from contextlib import suppress
from typing import Any, TextIO

# Controls, halves of characters, ends of lines and of paragraphs, and what has no glyph: marks of direction are some.
_UNSHOWN = frozenset({"Cc", "Cs", "Cf", "Zl", "Zp"})
_JOINERS = "\u200c\u200d"  # letters of several scripts, and of emoji, are joined with them


def printable(text: str, keep: str = "") -> str:
    """Return a text without what a terminal acts upon: each such character becomes its escape, `\\x1b` or `\\n`.

    Names of files, runs and tensors may have any characters. All text passes through here where it reaches a terminal.

    - `keep`: characters that stay as they are
    """
    if text.isprintable():
        return text
    return "".join(each if each in keep or _is_shown(each) else _escape(each) for each in text)


def say(line: str, file: TextIO | None = None, flush: bool = False) -> None:
    """Print one line, as `printable` makes it."""
    print(printable(line), file=file, flush=flush)


def _is_shown(character: str) -> bool:
    return unicodedata.category(character) not in _UNSHOWN or character in _JOINERS


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def abandon(stream: TextIO) -> None:
    """Lets a stream that cannot be written lead nowhere, so that what is still in it cannot fail at Python's exit."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class ResilientStream:
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
