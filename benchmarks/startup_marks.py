"""`gregale train` that ends after its first step and prints when each part before it had ended; for `startup.py`.

`python startup_marks.py BEGAN CONFIG ...`, with BEGAN the time at which the process was started, in seconds since 1970.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter

marks: dict[str, tuple[float, float]] = {}  # seconds of the wall and of the processor until the end of a part


def mark(part: str) -> None:
    used = os.times()
    marks.setdefault(part, (time.time() - float(sys.argv[1]), used.user + used.system))


def mark_before(owner: object, function: str, part: str) -> None:
    """Takes the call of a function for the end of a part."""
    called = getattr(owner, function)

    def marked(*arguments, **named):
        mark(part)
        return called(*arguments, **named)

    setattr(owner, function, marked)


def listen(event: str, duration_secs: float, **named: object) -> None:
    """Tracing and compiling the step end with an event each."""
    del duration_secs
    parts = {"jaxpr_to_mlir_module_duration": "step traced", "backend_compile_duration": "step compiled"}
    kind = event.rpartition("/")[2]
    if kind in parts and "counted_step" in str(named.get("fun_name")):
        mark(parts[kind])


programs = Counter()  # what JAX's cache tells: programs that it had, and that it was given


def count(event: str, **_: object) -> None:
    programs[event.rpartition("/")[2]] += 1


def end(log: object, step: int, report: object, figures: object) -> None:
    """In place of `StepLog.took`: waits for the step."""
    import jax

    del log, step, figures
    jax.block_until_ready(report)
    mark("first step")
    marks["programs compiled, read"] = programs["cache_misses"], programs["cache_hits"]
    print(json.dumps(marks), flush=True)
    os._exit(0)


def marked_command():
    """The command, imported as the command line imports it."""
    import jax

    mark("import jax")
    from gregale.programs.train import command, step_log

    mark("imports")
    mark_before(command, "prepare", "set up")
    mark_before(command, "starting_point", "text")
    mark_before(command, "Loop", "initial state")
    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.monitoring.register_event_listener(count)
    step_log.StepLog.took = end  # type: ignore[method-assign]
    return command.COMMAND


if __name__ == "__main__":
    from gregale.cli import Program, main

    main(["train", *sys.argv[2:]], {"train": Program("startup_marks", "")})
else:
    COMMAND = marked_command()
