"""Provides the error for a compiling process that crashes, such as by a failed check inside the compiler."""

from __future__ import annotations

import re
import signal
import tempfile

from gregale.errors import UserError

SHOWN_LINES = 3
# Log lines without the cause: stack frames, addresses, and the TPU library's report about itself.
_NOISE = re.compile(r"^\s*@ |^https://symbolize|^\*\*\* |\] RAW: |^=== Source Location Trace|^learning/")
_FATAL = re.compile(r"F\d{4} ")  # the compiler's mark of a fatal error
_PREFIX = re.compile(r"[A-Z]\d{4} \S+ +\d+ ")


def crashed(status: int, log: str, program: str) -> UserError:
    """Return the error for a compiling process that crashed, and save its complete log to a file.

    - `status`: as in `subprocess`: the exit status, or minus the number of the signal
    - `log`: the output of the process
    - `program`: the name of the compiled program
    """
    number, kept = tempfile.mkstemp(prefix="gregale-plan-", suffix=".log")
    with open(number, "w", encoding="utf-8") as file:
        file.write(log)
    shown_lines = " / ".join(last_lines(log)).rstrip(".") or "none"
    return UserError(
        f"the process that compiles the program {program!r} ended {_how(status)} before the compiler's memory report. "
        f"Its last lines: {shown_lines}. The whole log is in {kept}. {_advice(status)}"
    )


def last_lines(log: str) -> list[str]:
    """Return the compiler's fatal errors, or the last lines of a log that may have the cause."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and not _NOISE.search(line)]
    fatal = [line for line in lines if _FATAL.match(line)]
    return [*dict.fromkeys(_PREFIX.sub("", line) for line in fatal or lines)][-SHOWN_LINES:]


def _how(status: int) -> str:
    if status > 0:
        return f"with exit status {status}"
    try:
        return f"by {signal.Signals(-status).name} (signal {-status})"
    except ValueError:
        return f"by signal {-status}"


def _advice(status: int) -> str:
    if -status == signal.SIGKILL:
        return "A system that runs out of memory sends SIGKILL: more memory, or one compilation at a time, would work."
    return (
        "This is a fault of the compiler or of Gregale, not of the devices' memory. Other "
        "compute.compiler_options, or another compute.remat or compute.attention, may avoid it."
    )
