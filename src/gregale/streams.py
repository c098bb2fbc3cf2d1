"""Text without terminal control characters, and text streams that ignore write errors."""

import os
import sys
import unicodedata
from contextlib import suppress
from typing import Any, TextIO

# Control characters, surrogates, line and paragraph separators, and format characters such as direction marks.
_UNSHOWN = frozenset({"Cc", "Cs", "Cf", "Zl", "Zp"})
_JOINERS = "\u200c\u200d"  # they join letters of several scripts, and emoji


def printable(text: str, keep: str = "") -> str:
    """Return a text with each terminal control character replaced by its escape, such as `\\x1b` or `\\n`.

    Names of files, runs and tensors may contain any character. All text for a terminal passes through this function.

    - `keep`: characters that stay as they are
    """
    if text.isprintable():
        return text
    shown = {each for each in text if unicodedata.category(each) not in _UNSHOWN}.union(_JOINERS, keep)
    return "".join(each if each in shown else each.encode("unicode_escape").decode("ascii") for each in text)


def say(line: str, file: "TextIO | ResilientStream | None" = None, flush: bool = False) -> None:
    """Print one line after `printable` has escaped it."""
    print(printable(line), file=file, flush=flush)


def abandon(stream: TextIO) -> None:
    """Redirect a broken stream to the null device, so that its buffered text cannot fail at Python's exit."""
    with suppress(OSError, ValueError):
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, stream.fileno())
        os.close(null_device)


def say_beside(line: str) -> None:
    """Print one line to standard error, as `say`; ignore a closed stream."""
    say(line, ResilientStream(sys.stderr), flush=True)


LEFT_AT_EXIT = "left at exit"  # the name of threads that may still run when the process of a command ends


def exit_at_once(code: int) -> None:
    """End this process without Python's exit, which waits for threads and for other processes."""
    for stream in (sys.stdout, sys.stderr):
        ResilientStream(stream).flush()
    os._exit(code)


class ResilientStream:
    """A text stream that drops its output once its terminal is closed, its reader has ended or its disk is full."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text; drop it if the stream cannot be written."""
        try:
            return self._stream.write(text)
        except OSError:
            abandon(self._stream)
            return len(text)

    def flush(self) -> None:
        """Flush the stream; drop the buffered text if it cannot be written."""
        try:
            self._stream.flush()
        except OSError:
            abandon(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
