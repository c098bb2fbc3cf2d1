"""What the compiler writes to the process's standard error."""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_LOG_LINE = re.compile(r"^[WEF]\d{4} |^\d{4}-\d\d-\d\d .*: [WEF] |warning", re.IGNORECASE)
_REMATERIALIZATION = "involuntary full rematerialization"


@dataclass
class CompilerWarnings:
    """The warnings that came while the context was open; filled when it closes."""

    lines: list[str] = field(default_factory=list)

    @property
    def rematerializations(self) -> list[str]:
        """The warnings that a tensor was gathered in full because two shardings do not fit each other."""
        return [line for line in self.lines if _REMATERIALIZATION in line.lower()]


@contextmanager
def captured_compiler_warnings() -> Iterator[CompilerWarnings]:
    """Collect the warnings that XLA writes while the block runs.

    They are written by C++ code to file descriptor 2, which is therefore pointed at a temporary file meanwhile; what
    came is handed on to the real standard error at the end. Not for use in several threads at once.
    """
    caught = CompilerWarnings()
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            yield caught
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            log.seek(0)
            text = log.read()
            os.write(saved, text)
            os.close(saved)
            caught.lines += [line for line in text.decode(errors="replace").splitlines() if _LOG_LINE.search(line)]
