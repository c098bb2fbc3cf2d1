"""Child processes that end when their parent process ends."""

import ctypes
import os
import signal

_LIBC, _PR_SET_PDEATHSIG = ctypes.CDLL(None), 1  # loaded before any fork


def end_with_parent(number: int = signal.SIGTERM, parent: int | None = None) -> None:
    """Make the kernel send the signal `number` to this process when its parent ends.

    - `parent`: the parent's process id, for a call after the start of this process: if the parent has already ended,
      this process ends at once
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)
