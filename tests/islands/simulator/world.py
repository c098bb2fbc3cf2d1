"""The simulated world: a clock, a network that loses, delays and repeats, and nodes that come and go.

The coordinator is the real one (`protocol.membership`), without the sockets around it.

`schedules.run` makes a random schedule of faults in it. Nothing depends on anything but the seed; `trace` gets a line
for everything that happens.
"""

import heapq
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gregale.islands.protocol import messages as m
from gregale.islands.protocol.decision import decide
from gregale.islands.protocol.headers import NO_ROUND, Header, OuterRecord, Peer, View, seed
from gregale.islands.protocol.ledger import LeasePolicy
from gregale.islands.protocol.member import Member
from gregale.islands.protocol.membership import Ask, Membership
from gregale.islands.protocol.plans import FormGroup, NewGeneration, StartFleet
from gregale.islands.protocol.settings import Rules, Timing
from gregale.islands.protocol.trainer_side import REDUCES
from gregale.islands.trainer_command import RoundPacing
from gregale.methods.schedule import Schedule
from tests.islands.simulator.invariants import BrokenError, Invariants
from tests.islands.simulator.node import SEED, Node, hashed

TIMING = Timing(
    heartbeat_seconds=1.0,
    join_seconds=0.4,
    reduce_seconds=1.0,
    ping_seconds=0.5,
    retry_seconds=0.4,
    turnover_seconds=4.0,
    leave_seconds=8.0,
)
COORDINATOR = "coordinator"
IDS = 10**6  # between the first ids of two coordinators, one after the other: more than there are views
SLOWEST_STEP = 0.8  # seconds


@dataclass(frozen=True)
class Weather:
    """How the network behaves: shares of the messages, seconds."""

    lost: float
    late: float
    repeated: float
    failing: float  # share of reduces that fail at a member for no reason, and of heals
    stale: float  # share of sources that give the state before their newest one
    delay: float = 0.01


class World:
    """One schedule. `member_class` lets tests plant mistakes.

    - `bad`: islands whose data path is bad, while they reach the coordinator: they reach no other island
    - `heal_seconds`: that a transfer of the state takes, at most; in some worlds rounds are faster
    - `is_silent`: nobody can tell which island it is that does not answer in a reduce
    """

    def __init__(self, number: int, member_class: type[Member] = Member, trace: list[str] | None = None):
        self.now, self._count = 0.0, 0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.rng = random.Random(number)
        self.member_class, self.trace, self.timing = member_class, trace, TIMING
        rng = self.rng
        lease_policy, lockstep = LeasePolicy(size=40, low=24), rng.random() < 0.1
        self.rules = Rules(minimum=rng.choice((1, 1, 1, 2)), lease_policy=lease_policy, lockstep=lockstep)
        rough = rng.random() < 0.5
        self.weather = Weather(
            lost=rng.choice((0.02, 0.1, 0.25)) if rough else 0.0,
            late=rng.choice((0.0, 0.1)) if rough else 0.0,
            repeated=rng.choice((0.0, 0.1)) if rough else 0.0,
            failing=rng.choice((0.0, 0.05, 0.3)),
            stale=rng.choice((0.0, 0.2)),
        )
        self.pace = self._some_pace()
        self.bad: set[str] = set()
        self.is_silent = rng.random() < 0.2
        self.heal_seconds = rng.choice((0.6, 0.6, 4.0))
        self.invariants = Invariants()
        self.up, self.polling, self.up_since = True, False, 0.0
        self.nodes: dict[str, Node] = {}
        self.states: dict[str, OuterRecord] = {}
        self.cuts: set[frozenset[str]] = set()
        self.reduces: dict[str, tuple[m.Reduce, dict[str, str], str]] = {}
        self.restarts = self.starts = 0
        self.coordinator = self._membership()
        self.committed_at = 0.0
        self.newest_view: View | None = None

    def _some_pace(self) -> RoundPacing:
        rng, fragments = self.rng, self.rng.choice((1, 1, 2, 3))
        period = fragments * rng.choice((2, 3, 5))
        schedule = Schedule(period, fragments, min(rng.choice((0, 1, 2)), period - 1), fragments)
        return RoundPacing(schedule, sys.maxsize, self.rules.lockstep, REDUCES * self.timing.reduce_seconds)

    def log(self, line: str) -> None:
        """For whoever replays the schedule."""
        if self.trace is not None:
            self.trace.append(f"{self.now:7.3f} {line}")

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Something happens after a while; what happens at one time does so in this order."""
        self._count += 1
        heapq.heappush(self.queue, (self.now + seconds, self._count, what))

    def run_until(self, end: float) -> None:
        """Everything that happens before `end`."""
        while self.queue and self.queue[0][0] <= end:
            self.now, _, what = heapq.heappop(self.queue)
            what()
        self.now = end

    # Processes.

    def start(self, name: str) -> None:
        self.starts += 1
        rng = self.rng
        self._beat()
        node = Node(self, name, f"s{self.starts}", rng.choice((0.1, 0.3, SLOWEST_STEP)))
        self.nodes[name] = node
        self.states[node.identity] = seed(SEED)
        self.log(f"{name} starts as {node.identity}")
        node.tick()

    def kill(self, name: str) -> None:
        self.log(f"{name} dies")
        self.nodes[name].alive = False
        self.nodes[name].cut_off_at = self.now

    def pause(self, name: str) -> None:
        """SIGSTOP."""
        self.log(f"{name} is stopped")
        self.nodes[name].paused = True
        self.nodes[name].cut_off_at = self.now

    def resume(self, name: str) -> None:
        """SIGCONT: what came in the meantime is there at once."""
        node = self.nodes[name]
        if node.paused:
            self.log(f"{name} goes on")
            node.paused, node.cut_off_at = False, None
            kept, node.kept = node.kept, []
            if node.asking:
                number = node.asking
                self.later(0.1, lambda: node.give_up(number))
            for event in kept:
                node.tell(event)
            node.tick()

    # Network.

    def connected(self, one: str, other: str) -> bool:
        """Whether there is a way between two (nodes' names or the coordinator)."""
        return not self.cuts or frozenset((one, other)) not in self.cuts

    def reaches(self, one: str, other: str) -> bool:
        """Whether data can go between two islands."""
        return one == other or (self.connected(one, other) and not self.bad & {one, other})

    def send(self, source: str, target: str, what: Callable[[], None]) -> None:
        """A message: may be lost, late, repeated."""
        weather, rng = self.weather, self.rng
        for _ in range(1 + (rng.random() < weather.repeated)):
            if self.connected(source, target) and rng.random() >= weather.lost:
                late = rng.random() < weather.late
                self.later(rng.random() * (2.0 if late else weather.delay), what)

    # The coordinator.

    def ask(self, node: Node, header: Header) -> None:
        self.send(node.name, COORDINATOR, lambda: self._asked(header))

    def _asked(self, header: Header) -> None:
        if self.up:
            until = self.now + self.timing.ask_seconds
            self._beat()
            self.coordinator.ask(Ask(header.name, header.session, header.asked, header, until), self.now)
            self._answer_asks()

    def _membership(self) -> Membership:
        first_id = 1 + IDS * self.restarts
        return Membership(self.rules.minimum, self.timing.join_seconds, self.timing.heartbeat_seconds, first_id)

    def _beat(self) -> None:
        """The coordinator has heard of each node until now, or until that was cut off."""
        for node in self.nodes.values():
            here = node.alive and not node.paused and self.connected(node.name, COORDINATOR)
            heard = self.now if here else node.cut_off_at
            if heard is not None and heard >= self.up_since and self.now - heard < self.timing.heartbeat_seconds:
                self.coordinator.beat(node.name, node.member.identity.session, heard)

    def _answer_asks(self) -> None:
        self._beat()
        answers = self.coordinator.tick(self.now)
        formed = next((answer.view for answer in answers if answer.view), None)
        view = View(formed.id, tuple(ask.header for ask in formed.asks)) if formed else None
        if view and self.trace is not None:
            self.log(f"view {view.id}: {[h.identity for h in view.headers]}")
        for answer in answers:
            node = self.nodes[answer.ask.name]
            if answer.refused and node.identity == answer.ask.header.identity:  # else a process before it, dead by now
                raise BrokenError(f"the coordinator refuses {node.identity}: {answer.refused}")
            self._answer(answer.ask.header, view if answer.view else None)
        if self.coordinator.pending and not self.polling:
            self.polling = True
            self.later(0.15, self._poll)

    def _poll(self) -> None:
        self.polling = False
        if self.up:
            self._answer_asks()

    def _answer(self, header: Header, view: View | None) -> None:
        node = self.nodes.get(header.name)
        if node is not None and node.identity == header.identity:
            hear = (
                (lambda: node.answer(header.asked, m.ViewReceived(view)))
                if view
                else (lambda: node.give_up(header.asked))
            )
            self.send(COORDINATOR, header.name, hear)

    def stop_coordinator(self) -> None:
        self.log("the coordinator dies")
        self.up = False
        self.restarts += 1

    def start_coordinator(self) -> None:
        if not self.up:
            self.log("the coordinator starts")
            self.up, self.up_since = True, self.now
            self.coordinator = self._membership()

    # The engine.

    def reduce(self, node: Node, action: m.Reduce) -> None:
        """A member enters a reduce; it goes on when all are there."""
        state = self.states[node.identity].digest
        spec, there, parent = self.reduces.setdefault(action.key, (action, {}, state))
        if spec != action or parent != state:
            raise BrokenError(f"{node.name} reduces {action.key} with other members, weights or state than the others")
        own = [weight for peer, weight in zip(action.members, action.weights, strict=True) if peer.name == node.name]
        weight, message = node.promised
        if own != [weight] and not (node.has_diverged and own == [0.0]):
            raise BrokenError(f"{node.name} divides by weights that are not of this view: {own} {weight}")
        if weight and node.trainer.message != message:
            raise BrokenError(
                f"{node.name} sends {node.trainer.message!r} in a round for which it has told {message!r}"
            )
        there[node.name] = message if any(own) else ""
        if len(there) == len(action.members):
            for name in sorted(there):
                self.later(self.rng.uniform(0.01, 0.3), lambda name=name: self._reduced(name, action.key))

    def _reduced(self, name: str, key: str) -> None:
        action, there, parent = self.reduces[key]
        node = self.nodes[name]
        missing = tuple(each for each in sorted(there) if each != name and not self._takes_part(each, name, key))
        if missing or self.rng.random() < self.weather.failing:
            # As the engine: who does not answer is named, not who has let go of the reduce.
            silent = () if self.is_silent else (each for each in missing if not self._answers(each, name))
            node.reduced(key, None, tuple(silent))
        else:
            node.reduced(key, hashed(parent, action.members, action.weights, sorted(there.items())), ())

    def _takes_part(self, name: str, with_name: str, key: str) -> bool:
        node = self.nodes[name]
        return self._answers(name, with_name) and (
            node.reducing == key or key in node.prepared or node.member.outer.last == key
        )

    def _answers(self, name: str, to: str) -> bool:
        return self.nodes[name].hears and self.reaches(name, to)

    def dead(self, name: str, peers: Iterable[Peer]) -> frozenset[str]:
        """Which of these processes a node is certain to find dead: their hosts answer, and refuse it."""
        found = ((peer, self.nodes[peer.name]) for peer in peers if self.reaches(name, peer.name))
        return frozenset(peer.identity for peer, node in found if node.identity != peer.identity or not node.alive)

    def heal(self, node: Node, action: m.Heal) -> None:
        sources = self.rng.sample(action.sources, len(action.sources))
        self.later(self.rng.uniform(0.05, self.heal_seconds), lambda: self._healed(node, action, sources))

    def _healed(self, node: Node, action: m.Heal, sources: list) -> None:
        for peer in sources if self.rng.random() >= self.weather.failing else ():
            source = self.nodes.get(peer.name)
            if source and source.hears and self.reaches(peer.name, node.name):
                stale = self.rng.random() < self.weather.stale
                # What comes may be older than what was asked for: members must not take it.
                node.tell(m.Healed(source.previous if stale else source.member.outer))
                return
        node.tell(m.HealFailed("no source answers"))

    # What is agreed.

    def committed(self, node: Node, action: m.Commit, digest: str) -> None:
        outer = action.outer
        spec, there, parent = self.reduces[action.key]
        true = hashed(parent, spec.members, spec.weights, sorted(there.items()))
        if (digest, outer.digest) != (true, true):
            raise BrokenError(f"{node.name} commits what is not the result of {action.key}")
        if self.states[node.identity].digest != parent or outer.round != self.states[node.identity].round + 1:
            raise BrokenError(f"{node.name} commits {action.key} on a state that it does not belong to")
        self.invariants.commit(outer, parent)
        self.committed_at = self.now
        node.previous = self.states[node.identity]
        self.states[node.identity] = outer

    def installed(self, node: Node, outer: OuterRecord) -> None:
        self.invariants.publish(outer)
        self.invariants.install(self.states[node.identity], outer)
        node.previous = self.states[node.identity] = outer

    def published(self, node: Node, outer: OuterRecord) -> None:
        """A member's record of its state is `outer` now; the state is the same."""
        self.invariants.publish(outer)
        self.states[node.identity] = outer

    def seen(self, view: View) -> None:
        """A member sees a view: what it means is checked, once."""
        if view is self.newest_view:
            return
        self.newest_view, decision = view, decide(view, self.rules)
        plan = decision.plan
        if isinstance(plan, FormGroup) and (sound := self._sound(plan)):
            raise BrokenError(f"the messages of {sound} are left out: {plan.left_out}")
        if isinstance(plan, NewGeneration) and decision.top:
            self.invariants.turn(plan.generation, decision.top.generation, plan.waited)
        elif isinstance(plan, StartFleet):
            living = any(node.alive and self._has_state(node) for node in self.nodes.values())
            self.invariants.begin(plan.generation, living)

    def _sound(self, plan: FormGroup) -> list[str]:
        """Members whose message is left out, and that have not diverged, as far as their process lives."""
        left_out = {member.identity for member in plan.members if member.name in plan.left_out}
        return [n.name for n in self.nodes.values() if n.identity in left_out and not n.has_diverged]

    def _has_state(self, node: Node) -> bool:
        """Whether a process has a fleet's state, or will have it when it goes on."""
        fetched = any(isinstance(event, m.Healed) for event in node.kept)
        return fetched or self.states[node.identity].round > NO_ROUND
