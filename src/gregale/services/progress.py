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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum

OTHER_WORK = 10  # times the patience for a step: compiling, evaluating a batch, handing a checkpoint to its writer


class Doing(StrEnum):
    """What a main thread is at."""

    PREPARING = "preparing"  # before the first step: as long as it takes
    COMPILING = "compiling"  # until the first step of a program is done
    TRAINING = "training"
    EVALUATING = "evaluating"
    SAVING = "saving"
    ENDING = "ending"  # after everything that others could wait for

    def patience(self, seconds: float) -> float:
        """How long it may go on without coming on, in seconds.

        - `seconds`: of a step
        """
        if self in (Doing.PREPARING, Doing.ENDING):
            return math.inf
        return seconds if self is Doing.TRAINING else OTHER_WORK * seconds


@dataclass(frozen=True)
class Place:
    """Where a main thread is.

    - `steps`: done, or begun
    - `waits`: for its devices
    - `marks`: counts how often it came on
    """

    steps: int = 0
    doing: Doing = Doing.PREPARING
    waits: bool = False
    marks: int = 0

    def __str__(self) -> str:
        return f"{self.steps} {self.doing} {self.waits:d} {self.marks}"

    @classmethod
    def parse(cls, text: str) -> Place:
        """A place as `str` writes it."""
        steps, doing, waits, marks = text.split()
        return cls(int(steps), Doing(doing), waits == "1", int(marks))


class Progress:
    """Where the main thread of this process is; it writes, the thread of the signs of life reads."""

    def __init__(self) -> None:
        self.place = Place()

    def at(self, steps: int, doing: Doing) -> None:
        """The main thread has come on."""
        self.place = Place(steps, doing, False, self.place.marks + 1)

    def still(self) -> None:
        """The main thread has come on with what it is doing."""
        self.place = replace(self.place, marks=self.place.marks + 1)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the main thread waits for devices."""
        self.place = replace(self.place, waits=True)
        yield
        self.place = replace(self.place, waits=False, marks=self.place.marks + 1)


@dataclass(frozen=True)
class Standing:
    """A process by its name, where it is, and since when it has not come on."""

    name: str
    place: Place
    since: float

    def is_late(self, now: float, seconds: float) -> bool:
        return now - self.since > self.place.doing.patience(seconds)


def hanging(processes: Sequence[Standing], now: float, seconds: float) -> str | None:
    """Which process hangs, in a sentence; None while none does.

    Processes that wait for their devices may wait for another's. Of those that do not, the ones with the fewest steps
    hold up all others. If all wait, it is the devices of the ones with the fewest steps.

    - `processes`: all of them
    - `seconds`: `distributed.hang_seconds`
    """
    running = [each for each in processes if each.place.doing is not Doing.ENDING]
    suspects = [each for each in running if not each.place.waits] or running
    fewest = min((each.place.steps for each in suspects), default=0)
    behind = [each for each in suspects if each.place.steps == fewest]
    if not behind or not all(each.is_late(now, seconds) for each in behind):
        return None
    if behind[0].place.waits and any(not each.is_late(now, seconds) for each in running):
        return None
    return _sentence(behind, running, min(now - each.since for each in behind))


def _sentence(behind: Sequence[Standing], running: Sequence[Standing], stood: float) -> str:
    place = behind[0].place
    at = f"for {stood:.0f} s {place.doing} after {place.steps} steps"
    if place.doing in (Doing.TRAINING, Doing.COMPILING):
        at = f"for {stood:.0f} s in step {place.steps}"
        at += ", which it compiles" if place.doing is Doing.COMPILING else ""
    if len(behind) == len(running) > 1:
        waits = ", waiting for their devices" if place.waits else ""
        return f"All {len(behind)} processes hang: they have been {at}{waits}."
    names = ", ".join(each.name for each in behind[:3]) + (f" and {len(behind) - 3} more" if len(behind) > 3 else "")
    devices = ", waiting for devices" if place.waits else ""
    return f"{names} {'hangs: it has' if len(behind) == 1 else 'hang: they have'} been {at}{devices}."
