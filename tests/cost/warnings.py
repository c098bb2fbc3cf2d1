"""What the compiler writes to the process's standard error."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def rematerializations() -> Iterator[list[str]]:
    """Yield a list that at the end has XLA's warnings of arrays gathered in full, as two shardings do not fit.

    C++ code writes them to file descriptor 2, which is therefore a temporary file meanwhile. Not for several threads.
    """
    found: list[str] = []
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            yield found
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            log.seek(0)
            sys.stderr.write(text := log.read().decode(errors="replace"))
            found += [line for line in text.splitlines() if "involuntary full rematerialization" in line.lower()]
