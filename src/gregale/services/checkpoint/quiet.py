"""Keeps what Orbax and asyncio say of a save off the user's screen: its failures reach us as exceptions."""

import logging
import sys
from collections.abc import Callable
from typing import Any


def silence() -> None:
    """Silences them; to be called before the first save, and harmless when called again."""
    logging.getLogger("absl").addFilter(_is_not_orbaxs)
    logging.getLogger("asyncio").addFilter(_is_not_of_a_failed_save)
    if not isinstance(sys.unraisablehook, _WithoutLateAnswers):
        sys.unraisablehook = _WithoutLateAnswers(sys.unraisablehook)


def _is_not_orbaxs(entry: logging.LogRecord) -> bool:
    return "orbax" not in entry.pathname


def _is_not_of_a_failed_save(entry: logging.LogRecord) -> bool:
    """Of the many writes of a failed save, only the first one's exception is retrieved."""
    text = entry.getMessage()
    return "exception was never retrieved" not in text or "orbax" not in text


class _WithoutLateAnswers:
    """Passes over threads of a failed save that answer to an event loop which has ended."""

    def __init__(self, show: Callable[[Any], object]):
        self._show = show

    def __call__(self, unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self._show(unraisable)
