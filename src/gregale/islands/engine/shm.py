"""Arrays in the memory of /dev/shm whose files are unlinked as soon as they are open: a killed process leaves nothing.

array = empty((1000, 64), np.dtype("float32"))      # np.ndarray, zeros
"""

from __future__ import annotations

from pathlib import Path

import numpy as np


def empty(shape: tuple[int, ...], dtype: np.dtype, folder: Path | None = None) -> np.ndarray:
    """An array backed by a file without a name in `folder`, by default /dev/shm, or where that is not the temporary
    directory. Raises UserError when it is full."""
    raise NotImplementedError
