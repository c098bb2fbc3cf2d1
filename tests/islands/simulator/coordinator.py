"""A coordinator in the simulated world: the real one (`protocol.membership`), without the sockets around it."""

from collections.abc import Callable

from gregale.islands.protocol import messages as m
from gregale.islands.protocol.decision import StartFleet, decide
from gregale.islands.protocol.membership import Ask, Formed, Membership, Record
from gregale.islands.protocol.messages import Header, View
from tests.islands.simulator.invariants import BrokenError
from tests.islands.simulator.node import Node

COORDINATOR = "coordinator"
IDS = 10**6  # between the first ids of two coordinators, one after the other: more than there are views
POLL_SECONDS = 0.15  # between two ticks


class Coordinator:
    """One of the coordinators of a `World`; it may be dead, or stopped.

    - `up`: whether its process lives
    - `frozen_at`: when it was stopped, if it is
    - `behind`: seconds for which it was stopped
    - `restarts`: how often it has died
    - `disk`: what outlives its process
    """

    def __init__(self, world, index: int):
        self.world, self.index = world, index
        self.name = COORDINATOR + str(index or "")
        self.up, self._polling = True, False
        self.frozen_at: float | None = None
        self.behind = 0.0
        self._kept: list[Callable[[], None]] = []  # what it receives while it is stopped
        self.restarts = self._forgotten = 0
        self.disk: dict[str, Record] = {}
        self.views: dict[Formed, View] = {}
        self._begin()

    def _begin(self) -> None:
        self.membership = Membership(1 + IDS * (self.restarts + 1000 * self.index), self.disk)

    @property
    def clock(self) -> float:
        """Its clock, which stands still while it is stopped."""
        return self.world.now - self.behind

    @property
    def is_running(self) -> bool:
        return self.up and self.frozen_at is None

    def ask(self, node: Node, request: m.RequestView, term: int, needed: int) -> None:
        record = node.to_record
        self._take(node.name, lambda: self._asked(node, request, term, needed, record))

    def _record(self, node: Node, record: Record | None) -> None:
        if record:
            self.membership.record(node.member.identity.agreement, record)

    def _take(self, name: str, what: Callable[[], None]) -> None:
        """A message that it takes, if it is up; if it is stopped, later."""
        forgotten = self._forgotten

        def arrive() -> None:
            if forgotten < self._forgotten:
                return
            if self.up and self.frozen_at is not None:
                self._kept.append(arrive)
            elif self.up:
                what()
                self._answer_asks()

        self.world.send(name, self.name, arrive, min(2.0, self.world.timing.heartbeat_seconds / 2))

    def _asked(self, node: Node, request: m.RequestView, term: int, needed: int, record: Record | None) -> None:
        header, timing = request.header, self.world.timing
        numbers = needed, timing.gather_seconds, timing.heartbeat_seconds
        state = header.round, header.agreement, header.digest, header.recorded
        ask = Ask(header.name, header.session, header.asked, header, *numbers, term, *state)
        self._record(node, record)
        self.membership.ask(ask, self.clock)
        self.world.later(timing.hold_seconds, lambda: self._confirm(ask))

    def _confirm(self, ask: Ask) -> None:
        """It holds a request; the process repeats it."""
        node = self.world.nodes[ask.name]
        is_held = self.membership.pending.get(ask.name) is ask and node.identity == ask.header.identity
        if self.is_running and is_held:
            self.world.send(self.name, ask.name, lambda: node.repeat(ask.number))

    def beat(self, node: Node, round: int, here: bool, met: bool) -> None:
        seconds, beats, record = self.world.timing.heartbeat_seconds, node.beats, node.to_record

        def arrive() -> None:
            membership = self.membership
            self._record(node, record)
            membership.beat(node.name, node.member.identity.session, seconds, round, self.clock, here, met)
            event = m.Heartbeat("", membership.held(node.name), membership.newest, membership.behind)
            told = membership.hears, membership.term, membership.complete.get(node.member.identity.agreement)
            self.world.send(self.name, node.name, lambda: node.heartbeat(beats, event, self.index, *told))

        self._take(node.name, arrive)

    def leave(self, node: Node) -> None:
        session = node.member.identity.session
        self._take(node.name, lambda: self.membership.leave(node.name, session))

    def _answer_asks(self) -> None:
        answers = self.membership.tick(self.clock, self.behind)
        for answer in answers:
            view = self._view(answer.view) if answer.view else None
            node = self.world.nodes[answer.ask.name]
            if answer.refused and node.identity == answer.ask.header.identity:  # else a process before it, dead by now
                raise BrokenError(f"the coordinator refuses {node.identity}: {answer.refused}")
            is_of_another_term = answer.ask.term not in (0, self.membership.term)
            if view or self.membership.healthy.get(answer.ask.name) != answer.ask.session or is_of_another_term:
                self._answer(answer.ask.header, view)  # else it was repeated
        if self.membership.pending and not self._polling:
            self._polling = True
            self.world.later(POLL_SECONDS, self._poll)

    def _view(self, formed: Formed) -> View:
        """The members' form of its view, which it may give again."""
        world = self.world
        if formed not in self.views:
            view = self.views[formed] = View(formed.id, tuple(ask.header for ask in formed.asks), formed.stamp)
            world.log(f"view {view.id} of {self.name}: {', '.join(header.identity for header in view.headers)}")
            if world.rules.majority:
                world.invariants.form(view.stamp, {header.identity: header.asked for header in view.headers})
            if isinstance(decide(view, world.rules).plan, StartFleet) and (heard := self._heard()):
                raise BrokenError(f"a fleet begins beside {heard}, which the coordinator hears")
        return self.views[formed]

    def _heard(self) -> list[str]:
        """The islands in a fleet of which it certainly knows, also if it has just started."""
        weather, seconds = self.world.weather, self.world.timing.heartbeat_seconds
        is_late = weather.lost or weather.late or weather.delay > seconds / 5
        return [] if is_late else [node.name for node in self.world.nodes.values() if self._is_heard(node)]

    def _is_heard(self, node: Node) -> bool:
        is_reachable = self.world.connected(node.name, self.name) and node.hears
        since = max(node.reachable_since, node.in_fleet_since)
        return is_reachable and self.world.now - since > self.world.timing.heartbeat_seconds

    def _poll(self) -> None:
        self._polling = False
        if self.is_running:
            self._answer_asks()

    def _answer(self, header: Header, view: View | None) -> None:
        node, term = self.world.nodes.get(header.name), self.membership.term
        if node is not None and node.identity == header.identity:
            event = m.ViewReceived(view) if view else m.ViewFailed("the request was dropped")
            self.world.send(self.name, header.name, lambda: node.answer(header.asked, event, self.index, term))

    def stop(self) -> None:
        self.world.log(f"the {self.name} dies")
        self.up, self.frozen_at, self._kept = False, None, []
        self.restarts += 1

    def forget(self) -> None:
        """Its operator ends it, deletes its disk and starts it; nothing that was sent to it before arrives."""
        self.stop()
        self.disk.clear()
        self._forgotten += 1
        self.start()

    def start(self) -> None:
        if not self.up:
            self.world.log(f"the {self.name} starts")
            self.up = True
            self._begin()

    def freeze(self) -> None:
        """SIGSTOP, or its machine is suspended."""
        if self.is_running:
            self.world.log(f"the {self.name} is stopped")
            self.frozen_at = self.world.now

    def thaw(self) -> None:
        if self.frozen_at is not None:
            self.world.log(f"the {self.name} goes on")
            self.behind += self.world.now - self.frozen_at
            self.frozen_at = None
            kept, self._kept = self._kept, []
            for message in kept:
                message()
            self._answer_asks()
