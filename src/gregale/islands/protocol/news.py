"""What a coordinator tells its user: islands that come and go, and a fleet that makes no rounds. No clocks, no output.

news = News(heartbeat_seconds=2.0)
news.report("oslo", round=12, stalled="turin is waited for", now=now)   # with a heartbeat of oslo
for line in [*news.changes({"oslo": "9f31"}, now), *news.stall(asking={"oslo"}, now=now)]: ...
"""

from collections import Counter, deque
from collections.abc import Collection, Mapping
from statistics import median

ROUNDS = 15  # of which the usual time is the median
LATE = 3.0  # times the usual
FIRST_ROUND_SECONDS = 60.0  # in place of three usual times, until a round is known
NO_ROUND = -1


class Progress:
    """The usual time of a round, and since when there is none."""

    def __init__(self, now: float):
        self.round, self.since = NO_ROUND, now
        self._took: deque[float] = deque(maxlen=ROUNDS)

    @property
    def usual_seconds(self) -> float | None:
        """The median of the last rounds; None before there was one."""
        return median(self._took) if self._took else None

    def note(self, round: int, now: float, is_usual: bool) -> bool:
        """The newest round that was reported: whether it is a new one."""
        if round <= self.round:
            return False
        if self.round > NO_ROUND and is_usual:
            self._took.append((now - self.since) / (round - self.round))
        self.round, self.since = round, now
        return True

    def is_late(self, now: float, slack_seconds: float) -> bool:
        """Whether there was no round for three usual times."""
        usual = self.usual_seconds
        return now - self.since > (FIRST_ROUND_SECONDS if usual is None else LATE * usual) + slack_seconds


class News:
    """The lines of one coordinator; reports come `heartbeat_seconds` apart or less."""

    def __init__(self, heartbeat_seconds: float):
        self._heartbeat_seconds = heartbeat_seconds
        self._sessions: dict[str, str] = {}
        self._reports: dict[str, str] = {}  # of the healthy: why the fleet is stalled, if it is
        self._missed: set[str] = set()  # gone since the newest round
        self._left: set[str] = set()
        self._progress, self._is_stalled = Progress(0.0), False

    def report(self, name: str, round: int, stalled: str, now: float) -> list[str]:
        """An island says which round it has committed, and why it believes that there are no more, if it does."""
        self._reports[name] = stalled
        return self.note(round, now)

    def note(self, round: int, now: float) -> list[str]:
        """An island has committed this round."""
        began = self._progress.since
        if not self._progress.note(round, now, not self._is_stalled):
            return []
        self._missed.clear()
        was_stalled, self._is_stalled = self._is_stalled, False
        return [f"Rounds go on: round {round} after {now - began:.0f} s."] if was_stalled else []

    def leave(self, name: str) -> None:
        """An island says that it ends."""
        self._left.add(name)

    def changes(self, healthy: Mapping[str, str], now: float) -> list[str]:
        """Who has come and gone since the last call, from the sessions by name."""
        lines, before, self._sessions = [], self._sessions, dict(healthy)
        if not before or not healthy:  # there is nobody to wait for
            self._progress, self._is_stalled = Progress(now), False
            self._missed.clear()
        count = f"{len(healthy)} {'island' if len(healthy) == 1 else 'islands'} now"
        for name in sorted(healthy.keys() | before.keys()):
            if name not in before:
                self._missed.discard(name)
                lines.append(f"{name} is here: {count}.")
            elif name not in healthy:
                self._reports.pop(name, None)
                left = name in self._left
                self._missed |= set() if left else {name}
                why = "has left" if left else f"is gone, silent for {self._heartbeat_seconds:g} s"
                lines.append(f"{name} {why}: {count}.")
            elif healthy[name] != before[name]:
                lines.append(f"{name} has started again.")
        self._left.clear()
        return lines

    def stall(self, asking: Collection[str], now: float) -> list[str]:
        """A line when there was no round for three usual times, once."""
        if not self._sessions or self._is_stalled or not self._progress.is_late(now, self._heartbeat_seconds):
            return []
        self._is_stalled = True
        usual = self._progress.usual_seconds
        known = f" (usually one takes {usual:.1f} s)" if usual is not None else ""
        return [f"No round for {now - self._progress.since:.0f} s{known}: {self._reason(asking)}."]

    def _reason(self, asking: Collection[str]) -> str:
        told = Counter(stalled for _, stalled in sorted(self._reports.items()) if stalled)
        reasons = [reason for reason, _ in told.most_common(1)]
        if self._missed:
            reasons.append(f"silent since the last round: {', '.join(sorted(self._missed))}")
        if mute := [name for name in sorted(self._sessions) if name not in asking]:
            reasons.append(f"alive, but not asking for a round: {', '.join(mute)}")
        return "; ".join(reasons or [f"all that are here ask for a round: {', '.join(sorted(self._sessions))}"])
