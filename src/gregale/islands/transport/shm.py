"""Arrays in /dev/shm whose files have no name, so that a killed process leaves nothing behind.

    array = empty((1000, 64), np.dtype("float32"))      # np.ndarray of zeros

No other process shares them. They do not count as process memory that is swapped or copied by a fork. A too large array
is rejected here; otherwise the kernel would kill the process in the middle of a round.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from pathlib import Path

import numpy as np

from gregale.errors import UserError

SHARED_MEMORY = Path("/dev/shm")


def empty(shape: tuple[int, ...], dtype: np.dtype, folder: Path | None = None) -> np.ndarray:
    """Return an array of zeros in an unnamed file of `folder`; by default /dev/shm, else the temporary directory.

    Its memory is freed with its last reference. Raises UserError when the folder is full.
    """
    if folder is None:
        folder = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return np.zeros(shape, dtype)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            memory = mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise UserError(
            f"An array of {size / 1e6:.1f} MB for the outer state has no room in {folder} ({error.strerror}; "
            f"{free_bytes(folder) / 1e6:.1f} MB are free). Make it larger: mount -o remount,size=... {folder}"
        ) from None
    return np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)


def free_bytes(folder: Path) -> int:
    """Return the free bytes of a folder's file system; 0 if they are unknown."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize
