"""Lines about rounds that have stopped: of a coordinator (`News`) and of one island (`Stalls`). No output.

The first comes after three median rounds. An island repeats it, each time after twice the time.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from statistics import median
from typing import TYPE_CHECKING

from gregale.islands.protocol.messages import NO_ROUND, OuterRecord

if TYPE_CHECKING:  # a coordinator needs no JAX
    from gregale.islands.protocol.member import Member
    from gregale.islands.protocol.trainer_side import TrainerSide

ROUNDS = 15  # in the median
LATE = 3.0  # times the median
FIRST_ROUND_SECONDS = 60.0  # a coordinator's limit for the first round, in place of three medians
COMPILES = "this island compiles the programs of the next stage"  # the beginning of an island's reason
LEAST_SECONDS = 1.0  # shortest silence that an island reports
AGAIN = 2  # factor between the times of two lines
SETTLED = 2  # median rounds after a silence of the coordinator, in which a line would blame the islands for it
LONGEST_GAP_SECONDS = 0.5  # between two readings of a process that runs
CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # the first also counts while the machine is suspended


class RunningTime:
    """Seconds for which this process ran; `stopped`: for which it did not. Read it every 0.1 s, under one lock.

    A long gap between two readings means that the process was stopped (SIGSTOP), or its machine suspended. So nobody
    else was silent then, and no wait for another process is over.
    """

    def __init__(self, clock: Callable[[], float] = lambda: time.clock_gettime(CLOCK)):
        self._clock, self._last, self.stopped = clock, clock(), 0.0

    def __call__(self) -> float:
        now = self._clock()
        if now - self._last > LONGEST_GAP_SECONDS:
            self.stopped += now - self._last
        self._last = now
        return now - self.stopped


class Progress:
    """The median time of a round, and the time of the newest round."""

    def __init__(self, now: float):
        self.round, self.since = NO_ROUND, now
        self._took: deque[float] = deque(maxlen=ROUNDS)

    @property
    def usual_seconds(self) -> float | None:
        """The median of the last rounds; None before the first."""
        return median(self._took) if self._took else None

    def note(self, round: int, now: float, is_usual: bool) -> bool:
        if round <= self.round:
            return False
        if self.round > NO_ROUND and is_usual:
            self._took.append((now - self.since) / (round - self.round))
        self.round, self.since = round, now
        return True

    def is_late(self, now: float, slack_seconds: float) -> bool:
        usual = self.usual_seconds
        return now - self.since > (FIRST_ROUND_SECONDS if usual is None else LATE * usual) + slack_seconds


class News:
    """The lines of one coordinator; reports come at most `heartbeat_seconds` apart."""

    def __init__(self):
        self._heartbeat_seconds = 0.0  # as of the islands that were here last
        self._sessions: dict[str, str] = {}
        self._reports: dict[str, str] = {}  # of the healthy islands: the reason of a stall, or empty
        self._missed: set[str] = set()  # silent since the newest round
        self._left: set[str] = set()
        self._progress, self._is_stalled = Progress(0.0), False

    def report(self, name: str, round: int, stalled: str, now: float) -> list[str]:
        self._reports[name], began = stalled, self._progress.since
        if not self._progress.note(round, now, not self._is_stalled):
            return []
        self._missed.clear()
        was_stalled, self._is_stalled = self._is_stalled, False
        return [f"Rounds go on: round {round} after {now - began:.0f} s."] if was_stalled else []

    def leave(self, name: str) -> None:
        self._left.add(name)

    def changes(self, healthy: Mapping[str, str], now: float, heartbeat_seconds: float) -> list[str]:
        """Return lines about islands that came or went since the last call; `healthy` has sessions by name."""
        lines, before, self._sessions = [], self._sessions, dict(healthy)
        self._heartbeat_seconds = heartbeat_seconds or self._heartbeat_seconds
        if not before or not healthy:  # no fleet: nothing can stall
            self._progress, self._is_stalled = Progress(now), False
            self._missed.clear()
        count = f"{len(healthy)} {'island' if len(healthy) == 1 else 'islands'} now"
        for name in sorted({name for name, _ in healthy.items() ^ before.items()}):
            if name not in before:
                self._missed.discard(name)
                lines.append(f"{name} joined: {count}.")
            elif name not in healthy:
                self._reports.pop(name, None)
                left = name in self._left
                self._missed |= set() if left else {name}
                why = "has left" if left else f"is gone, silent for {self._heartbeat_seconds:g} s"
                lines.append(f"{name} {why}: {count}.")
            else:
                lines.append(f"{name} has started again.")
        self._left.clear()
        return lines

    def stall(self, asking: Collection[str], now: float) -> list[str]:
        """Return one line when there was no round for three median times."""
        if not self._sessions or self._is_stalled or not self._progress.is_late(now, self._heartbeat_seconds):
            return []
        self._is_stalled = True
        usual = self._progress.usual_seconds
        known = f" (usually one takes {usual:.1f} s)" if usual is not None else ""
        return [f"No round for {now - self._progress.since:.0f} s{known}: {self._reason(asking)}."]

    def _reason(self, asking: Collection[str]) -> str:
        compiling = [name for name, stalled in sorted(self._reports.items()) if stalled.startswith(COMPILES)]
        counts = Counter(each for name, each in sorted(self._reports.items()) if each and name not in compiling)
        reasons = [reason for reason, _ in counts.most_common(1)]
        if compiling:  # the others may wait for these
            reasons.insert(0, f"compiling the programs of the next stage: {', '.join(compiling)}")
        if self._missed:
            reasons.append(f"silent since the last round: {', '.join(sorted(self._missed))}")
        if mute := [name for name in sorted(self._sessions) if name not in asking]:
            reasons.append(f"alive, but not asking for a round: {', '.join(mute)}")
        return "; ".join(reasons or [f"all islands request a round: {', '.join(sorted(self._sessions))}"])


class Stalls:
    """The rounds of one member. Before its first, a round counts as late from when it is due, by `Timing`.

    - `compiles`: returns whether the trainer waits for the compiler
    - `line`, `reason`: the last stall line and the reason in it, while no round is committed

    Times are those of `RunningTime`.
    """

    def __init__(self, member: "Member", trainer: "TrainerSide", compiles: Callable[[], bool] = lambda: False):
        self._member, self._trainer, self._compiles = member, trainer, compiles
        self._took: deque[float] = deque(maxlen=ROUNDS)
        self._since: float | None = None  # the last round, or the time at which the first one was due
        self._next = 0.0  # seconds after which the next line is due
        self._has_rounds, self._stopped = False, 0.0
        self.line: str | None = None
        self.reason: str | None = None

    def _usual_seconds(self) -> float:
        timing = self._member.timing
        return median(self._took) if self._took else timing.join_seconds + timing.reduce_seconds

    def _late_seconds(self) -> float:
        return max(LATE * self._usual_seconds(), LEAST_SECONDS)

    def went_on(self, now: float, outer: OuterRecord, is_healed: bool = False) -> str | None:
        """Record a committed or fetched state; return a line if it ends a stall."""
        seconds = now - self._since if self._since is not None else 0.0
        if self._has_rounds and not is_healed:
            self._took.append(seconds)
        was_stalled, self.line, self.reason = self.line is not None, None, None
        self._has_rounds, self._since = True, now
        self._next = self._late_seconds()
        return f"Rounds go on: round {outer.round} after {format_seconds(seconds)}." if was_stalled else None

    def look(self, now: float, stopped: float = 0.0) -> str | None:
        """Return the stall line that is due now, if any.

        `stopped`: the seconds for which this process did not run so far. After a stop that the others have noticed, the
        wait for a round begins again: it is not their fault.
        """
        member = self._member
        gap, self._stopped = stopped - self._stopped, stopped
        if member.done or member.is_complete:
            return None
        if gap >= member.timing.heartbeat_seconds and self._since is not None:
            self._since, self._next = now, self._late_seconds()
            self.reason = "this process was stopped, or its machine was suspended"
            self.line = f"No round for {format_seconds(gap)}: {self.reason}."
            return self.line
        if self._since is None:
            if member.handover.due or member.outer.round == NO_ROUND:
                self._since, self._next = now, self._late_seconds()
            return None
        seconds = now - self._since
        if seconds < self._next:
            return None
        if not member.is_reason_known(self._since + self._next, SETTLED * self._usual_seconds()):
            return None
        self._next = AGAIN * seconds
        self.reason = self._why()
        self.line = f"No round for {format_seconds(seconds)}: {self.reason}."
        return self.line

    def _why(self) -> str:
        number, why = self._member.outer.round, self._member.stall_reason()
        if number == NO_ROUND:
            return why or "the fleet has not begun"
        if self._compiles():
            compiles = COMPILES if number in self._member.rules.stages else "this island compiles a program"
            return f"{compiles}; {why}" if why else compiles
        why = why or self._of_steps(number)
        return f"{why}; all data leased to this island is used" if self._member.handover.starved else why

    def _of_steps(self, number: int) -> str:
        handover = self._member.handover
        if handover.due and handover.wanted is not None:
            return f"this island is in the middle of a step (one takes {handover.step_seconds:.1f} s)"
        made, needed = self._trainer.progress(number)
        if needed == 0:
            return "this island has not handed over its message of a round after the last step"
        return f"this island has made {made} of the {needed} steps of a round"


def format_seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
