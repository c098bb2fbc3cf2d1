"""The coordinator as torchft's lighthouse behaves: who asks is gathered, and answered with one view.

A view forms when all members of the last one have asked ("fast quorum"); else when more than half of the healthy ones
have, and all healthy ones have or `join_seconds` have passed since the first asked. Its id counts changes of
membership. A restart loses everything: ids begin at 1 again.
"""

from dataclasses import dataclass, field

from gregale.islands.protocol.headers import Header, View


@dataclass
class Coordinator:
    """Call `ask` for every ask that arrives and `view` now and then; both with the identities that are healthy."""

    join_seconds: float
    id: int = 0
    last: frozenset[str] | None = None
    asking: dict[str, tuple[float, Header]] = field(default_factory=dict)
    started: float = 0.0

    def restart(self, now: float) -> None:
        """Loses all memory."""
        self.id, self.last, self.asking, self.started = 0, None, {}, now

    def ask(self, header: Header, now: float) -> None:
        """An ask arrives; it replaces an older one of the same member, also where it is the older."""
        self.asking[header.identity] = (now, header)

    def view(self, healthy: set[str], now: float) -> View | None:
        """The view that can be formed now, if one can; whoever is in it has its answer."""
        here = [who for who in self.asking if who in healthy]
        if not here:
            return None
        if self.last is None or not self.last.issubset(here):
            first = min(self.asking[who][0] for who in here)
            if 2 * len(here) <= len(healthy) or (len(here) < len(healthy) and now - first < self.join_seconds):
                return None
        members = frozenset(here)
        if members != self.last:
            self.id, self.last = self.id + 1, members
        headers = tuple(self.asking[who][1] for who in sorted(here))
        self.asking.clear()
        return View(self.id, headers)
