"""Detection of processes whose main thread hangs.

A dead or stopped process sends no heartbeats. A process whose main thread hangs (a disk that does not respond, a
deadlock, a device that never finishes) still sends them, from another thread. So each heartbeat contains the progress
of the main thread, and process 0 compares them. A process hangs if it is behind all others without progress for
`distributed.hang_seconds`. The training loop records its progress:

    progress.at(step, Phase.TRAINING)
    with progress.waiting():  # for the devices, and so perhaps for other processes
        jax.device_get(report)

A process that prepares its data or restores a checkpoint has no time limit.
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum

from gregale.formatting import listed

OTHER_WORK = 10  # timeout of other phases (compiling, evaluating, saving) in units of the timeout of a step


class Phase(StrEnum):
    """The current work of a main thread."""

    PREPARING = "preparing"  # before the first step: no time limit
    COMPILING = "compiling"  # until the first step of a program is done
    TRAINING = "training"
    EVALUATING = "evaluating"
    SAVING = "saving"
    SYNCHRONISING = "synchronising"  # waiting for other islands: no time limit
    ENDING = "ending"  # no other process waits for this process any more

    def timeout(self, seconds: float) -> float:
        """Return the maximum seconds without progress in this phase; `seconds`: the timeout of a step."""
        if self in (Phase.PREPARING, Phase.SYNCHRONISING, Phase.ENDING):
            return math.inf
        return seconds if self is Phase.TRAINING else OTHER_WORK * seconds


@dataclass(frozen=True)
class ThreadProgress:
    steps: int = 0  # done or begun
    phase: Phase = Phase.PREPARING
    waits: bool = False  # whether the thread waits for its devices
    marks: int = 0  # number of progress updates
    since: float = field(default_factory=time.monotonic, compare=False)  # time at which this process received it

    def __str__(self) -> str:
        return f"{self.steps} {self.phase} {self.waits:d} {self.marks}"

    @classmethod
    def parse(cls, text: str) -> "ThreadProgress":
        steps, phase, waits, marks = text.split()
        return cls(int(steps), Phase(phase), waits == "1", int(marks))

    def is_late(self, now: float, seconds: float) -> bool:
        """Return whether the thread has made no progress for longer than `Phase.timeout`."""
        return now - self.since > self.phase.timeout(seconds)


class Progress:
    """The progress of this process's main thread, which writes it; the heartbeat thread reads it."""

    def __init__(self) -> None:
        self.current = ThreadProgress()

    def at(self, steps: int, phase: Phase) -> None:
        """Record that the main thread enters a phase."""
        self.current = ThreadProgress(steps, phase, False, self.current.marks + 1)

    def still(self) -> None:
        """Record progress within the current phase."""
        self._update(self.current.waits)

    @contextmanager
    def waiting(self, phase: Phase | None = None) -> Iterator[None]:
        """Record that the main thread waits inside the block: for devices, or as `phase` says."""
        before = self.current.phase
        self.current = replace(self.current, phase=phase or before, waits=True, since=time.monotonic())
        yield
        self.current = replace(self.current, phase=before if phase else self.current.phase)
        self._update(False)

    def _update(self, waits: bool) -> None:
        self.current = replace(self.current, waits=waits, marks=self.current.marks + 1, since=time.monotonic())


def find_hung(processes: Mapping[str, ThreadProgress], now: float, seconds: float) -> str | None:
    """Return a sentence that names the hanging processes; None if none hangs.

    A process that waits for its devices may wait for the devices of another process. Of the processes that do not
    wait, those with the fewest steps block all others. If all wait, the devices of those with the fewest steps hang.

    - `processes`: the progress of each process, by its name
    - `seconds`: `distributed.hang_seconds`
    """
    running = {name: each for name, each in processes.items() if each.phase is not Phase.ENDING}
    suspects = {name: each for name, each in running.items() if not each.waits} or running
    fewest = min((each.steps for each in suspects.values()), default=0)
    behind = {name: each for name, each in suspects.items() if each.steps == fewest}
    if not behind or not all(each.is_late(now, seconds) for each in behind.values()):
        return None
    waits = any(each.waits for each in behind.values())
    if waits and not all(each.is_late(now, seconds) for each in running.values()):
        return None
    return _sentence(behind, len(running), now)


def _sentence(behind: Mapping[str, ThreadProgress], running: int, now: float) -> str:
    first, stood = next(iter(behind.values())), now - max(each.since for each in behind.values())
    at = f"for {stood:.0f} s {first.phase} after {first.steps} steps"
    if first.phase in (Phase.TRAINING, Phase.COMPILING):
        at = f"for {stood:.0f} s in step {first.steps}"
        at += ", which it compiles" if first.phase is Phase.COMPILING else ""
    if len(behind) == running > 1:
        waits = ", waiting for their devices" if first.waits else ""
        return f"All {len(behind)} processes hang: they have been {at}{waits}."
    names = listed([*behind], 3)
    devices = ", waiting for devices" if first.waits else ""
    return f"{names} {'hangs: it has' if len(behind) == 1 else 'hang: they have'} been {at}{devices}."
