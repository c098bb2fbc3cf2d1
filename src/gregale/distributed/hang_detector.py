"""How far the processes of a run have come, and which of them hangs.

A process that is dead or stopped gives no sign of life. One whose main thread hangs (a disk that does not answer, a
deadlock, a device that never finishes) still gives them, from a thread of its own. So with each it tells where its main
thread is, and process 0 compares: whoever is behind and has not come on for `distributed.hang_seconds` hangs. The loop
says where it is,

    progress.at(step, Doing.TRAINING)
    with progress.waiting():  # for the devices, and so perhaps for other processes
        jax.device_get(report)

and nothing is judged while a process prepares its data or restores a checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum

OTHER_WORK = 10  # times the patience for a step: compiling, evaluating a batch, handing a checkpoint to its writer


class Phase(StrEnum):
    """What a main thread is at."""

    PREPARING = "preparing"  # before the first step: as long as it takes
    COMPILING = "compiling"  # until the first step of a program is done
    TRAINING = "training"
    EVALUATING = "evaluating"
    SAVING = "saving"
    ENDING = "ending"  # after everything that others could wait for

    def timeout(self, seconds: float) -> float:
        """How long it may go on without coming on, in seconds.

        - `seconds`: of a step
        """
        if self in (Phase.PREPARING, Phase.ENDING):
            return math.inf
        return seconds if self is Phase.TRAINING else OTHER_WORK * seconds


@dataclass(frozen=True)
class ThreadProgress:
    """Where a main thread is.

    - `steps`: done, or begun
    - `waits`: for its devices
    - `marks`: counts how often it came on
    - `since`: when this process learned of it, which is no part of it
    """

    steps: int = 0
    doing: Phase = Phase.PREPARING
    waits: bool = False
    marks: int = 0
    since: float = field(default_factory=time.monotonic, compare=False)

    def __str__(self) -> str:
        return f"{self.steps} {self.doing} {self.waits:d} {self.marks}"

    @classmethod
    def parse(cls, text: str) -> ThreadProgress:
        """A place as `str` writes it."""
        steps, doing, waits, marks = text.split()
        return cls(int(steps), Phase(doing), waits == "1", int(marks))

    def is_late(self, now: float, seconds: float) -> bool:
        """Return whether the thread has been here for longer than `Phase.patience` gives it."""
        return now - self.since > self.doing.timeout(seconds)


class Progress:
    """Where the main thread of this process is; it writes, the thread of the signs of life reads."""

    def __init__(self) -> None:
        self.place = ThreadProgress()

    def at(self, steps: int, doing: Phase) -> None:
        """The main thread has come on."""
        self.place = ThreadProgress(steps, doing, False, self.place.marks + 1)

    def still(self) -> None:
        """The main thread has come on with what it is doing."""
        self._come_on(self.place.waits)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the main thread waits for devices."""
        self.place = replace(self.place, waits=True, since=time.monotonic())
        yield
        self._come_on(False)

    def _come_on(self, waits: bool) -> None:
        self.place = replace(self.place, waits=waits, marks=self.place.marks + 1, since=time.monotonic())


def find_hung(processes: Mapping[str, ThreadProgress], now: float, seconds: float) -> str | None:
    """Which process hangs, in a sentence; None while none does.

    Processes that wait for their devices may wait for another's. Of those that do not, the ones with the fewest steps
    hold up all others. If all wait, it is the devices of the ones with the fewest steps.

    - `processes`: where each of them is, by its name
    - `seconds`: `distributed.hang_seconds`
    """
    running = {name: place for name, place in processes.items() if place.doing is not Phase.ENDING}
    suspects = {name: place for name, place in running.items() if not place.waits} or running
    fewest = min((place.steps for place in suspects.values()), default=0)
    behind = {name: place for name, place in suspects.items() if place.steps == fewest}
    if not behind or not all(place.is_late(now, seconds) for place in behind.values()):
        return None
    waits = any(place.waits for place in behind.values())
    if waits and not all(place.is_late(now, seconds) for place in running.values()):
        return None
    return _sentence(behind, len(running), now)


def _sentence(behind: Mapping[str, ThreadProgress], running: int, now: float) -> str:
    place, stood = next(iter(behind.values())), now - max(place.since for place in behind.values())
    at = f"for {stood:.0f} s {place.doing} after {place.steps} steps"
    if place.doing in (Phase.TRAINING, Phase.COMPILING):
        at = f"for {stood:.0f} s in step {place.steps}"
        at += ", which it compiles" if place.doing is Phase.COMPILING else ""
    if len(behind) == running > 1:
        waits = ", waiting for their devices" if place.waits else ""
        return f"All {len(behind)} processes hang: they have been {at}{waits}."
    names = ", ".join([*behind][:3]) + (f" and {len(behind) - 3} more" if len(behind) > 3 else "")
    devices = ", waiting for devices" if place.waits else ""
    return f"{names} {'hangs: it has' if len(behind) == 1 else 'hang: they have'} been {at}{devices}."
