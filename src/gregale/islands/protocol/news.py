"""The coordinator's lines for its user: islands that come and go, and stalled fleets. No clocks, no output."""

from collections import Counter, deque
from collections.abc import Collection, Mapping
from statistics import median

from gregale.islands.protocol.messages import NO_ROUND

ROUNDS = 15  # in the median
LATE = 3.0  # times the median
FIRST_ROUND_SECONDS = 60.0  # limit for the first round, in place of three medians
COMPILES = "this island compiles the programs of the next stage"  # the beginning of an island's reason


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
        """Record the newest reported round; return whether it is new."""
        if round <= self.round:
            return False
        if self.round > NO_ROUND and is_usual:
            self._took.append((now - self.since) / (round - self.round))
        self.round, self.since = round, now
        return True

    def is_late(self, now: float, slack_seconds: float) -> bool:
        """Return whether there was no round for three median times."""
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
        """Record an island's committed round and its reason for a stall, if any."""
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
