"""What the compiler writes to the process's standard error."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class CompilerWarnings:
    """The warnings that a tensor was gathered in full because two shardings do not fit each other."""

    rematerializations: list[str] = field(default_factory=list)


@contextmanager
def captured_compiler_warnings() -> Iterator[CompilerWarnings]:
    """Collect the warnings that XLA writes while the block runs, and write them to standard error at its end.

    C++ code writes them to file descriptor 2, which is therefore a temporary file meanwhile. Not for several threads.
    """
    caught = CompilerWarnings()
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            yield caught
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            log.seek(0)
            text = log.read().decode(errors="replace")
            sys.stderr.write(text)
            caught.rematerializations += [
                line for line in text.splitlines() if "involuntary full rematerialization" in line.lower()
            ]
