"""Processes that end with the one that started them, however it ended."""

from __future__ import annotations

import ctypes
import os
import signal

_LIBC, _PR_SET_PDEATHSIG = ctypes.CDLL(None), 1  # loaded before any fork


def end_with_parent(number: int = signal.SIGTERM, parent: int | None = None) -> None:
    """The kernel sends this process the signal `number` when its parent is gone.

    - `parent`: the parent's process id, for a process that asks this of itself after its start: a parent that is gone
      by then ends it at once
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)
