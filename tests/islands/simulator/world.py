"""The simulated world: a clock, a network that loses, delays and repeats, and nodes that come and go.

`schedules.run` makes a random schedule of faults in it. Nothing depends on anything but the seed; `trace` gets a line
for everything that happens.
"""

import heapq
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from gregale.islands.protocol import messages as m
from gregale.islands.protocol.decision import Adopt, FormGroup, NewGeneration, StartFleet, decide
from gregale.islands.protocol.ledger import LeasePolicy
from gregale.islands.protocol.member import Member
from gregale.islands.protocol.messages import NO_ROUND, Generation, Header, OuterRecord, Peer, Rules, Timing, View, seed
from gregale.islands.protocol.trainer_side import REDUCES
from gregale.islands.trainer_command import RoundPacing
from gregale.methods.schedule import Schedule
from tests.islands.simulator.coordinator import Coordinator
from tests.islands.simulator.invariants import BrokenError, Invariants
from tests.islands.simulator.node import SEED, Checkpoint, Node, hashed
from tests.islands.simulator.trainer import Trainer

TIMING = Timing(
    heartbeat_seconds=1.0,
    join_seconds=0.4,
    reduce_seconds=1.0,
    ping_seconds=0.5,
    retry_seconds=0.4,
    turnover_seconds=4.0,
    leave_seconds=8.0,
    hold_seconds=0.5,
    network_seconds=1.0,
)
COPIES = (0.0, 0.0, 1.0, 4.0)  # seconds of a message to the host, in some worlds; 0: as in the others
UNEQUAL = (0.1, 0.3, 2.0, 5.0)  # seconds of a step in some schedules
SAVES = 0.1  # share of steps after which an island saves


@dataclass(frozen=True)
class Weather:
    """How the network behaves: shares of the messages, seconds."""

    lost: float
    late: float
    repeated: float
    failing: float  # share of reduces that fail at a member for no reason, and of heals
    stale: float  # share of sources that give the state before their newest one
    delay: float = 0.01


def some_timing(rng: random.Random) -> Timing:
    """Return seconds drawn from wide ranges. A message takes less than a heartbeat timeout, and a reduce its limit."""

    def some(low: float, high: float) -> float:
        return low * (high / low) ** rng.random()

    return Timing(
        heartbeat_seconds=some(0.5, 10.0),
        join_seconds=some(0.001, 5.0),
        reduce_seconds=some(0.8, 5.0),
        ping_seconds=some(0.05, 2.0),
        retry_seconds=some(0.02, 4.0),
        turnover_seconds=some(0.5, 15.0),
        leave_seconds=some(1.0, 20.0),
        hold_seconds=some(0.1, 5.0),
        network_seconds=some(0.5, 3.0),
    )


class World:
    """One schedule. `member_class` lets tests plant mistakes.

    - `bad`: islands whose data path is bad, while they reach the coordinator: they reach no other island
    - `heal_seconds`: that a transfer of the state takes, at most; in some worlds rounds are faster
    - `is_silent`: nobody can tell which island it is that does not answer in a reduce
    """

    def __init__(
        self, number: int, member_class: type[Member] = Member, trace: list[str] | None = None, coordinators: int = 1
    ):
        self.number, self.now, self._count = number, 0.0, 0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.rng = random.Random(number)
        self.member_class, self.trainer_class, self.trace = member_class, Trainer, trace
        rng = self.rng
        self.timing = TIMING if rng.random() < 0.5 else some_timing(rng)
        lease_policy, lockstep = LeasePolicy(size=40, low=24), rng.random() < 0.1
        minimum, start = rng.choice((1, 1, 1, 2)), rng.choice((1, 1, 2, 3))
        self.rules = Rules(minimum, lease_policy, start, lockstep, stages=(4, 9) if number % 3 == 1 else ())
        rough = rng.random() < 0.5
        self.weather = Weather(
            lost=rng.choice((0.02, 0.1, 0.25)) if rough else 0.0,
            late=rng.choice((0.0, 0.1)) if rough else 0.0,
            repeated=rng.choice((0.0, 0.1)) if rough else 0.0,
            failing=rng.choice((0.0, 0.05, 0.3)),
            stale=rng.choice((0.0, 0.2)),
            delay=rng.choice((0.01, 0.1)),
        )
        self.pace = self._some_pace()
        self.rules = replace(self.rules, fragments=(self.pace.schedule.fragments,), majority=coordinators > 1)
        self.bad: set[str] = set()
        self.is_silent = rng.random() < 0.2
        self.heal_seconds = rng.choice((0.6, 0.6, 4.0))
        self.invariants = Invariants(is_strict=coordinators > 1)
        self.electors: dict[tuple[Generation, int], tuple[str, ...]] = {}
        self.nodes: dict[str, Node] = {}
        self.step_seconds: dict[str, float] = {}  # by name; otherwise drawn from `speeds`
        self.copy_seconds: dict[str, float] = {}  # of a message to the host, by name; otherwise drawn
        self.speeds = UNEQUAL if number % 5 == 4 else (0.1, 0.3, 0.8)
        self.states: dict[str, OuterRecord] = {}
        self.disks: dict[str, tuple[Checkpoint, int]] = {}  # with the number of examples that the island has used
        self.cuts: set[tuple[str, str]] = set()  # one-way
        self.reduces: dict[str, tuple[m.Reduce, dict[str, str], str]] = {}
        self.starts = 0
        self.coordinators = [Coordinator(self, index) for index in range(coordinators)]
        self.committed_at = 0.0
        self.final: set[str] = set()  # digests of the states with which islands have completed the run
        self.fleets = 0  # that have begun
        self.complete: set[str] = set()  # islands that have completed the run
        self.seen_views: set[int] = set()  # by `id` of those of the coordinators

    def _some_pace(self) -> RoundPacing:
        rng, fragments = self.rng, self.rng.choice((1, 1, 2, 3))
        period = fragments * rng.choice((2, 3, 5))
        schedule = Schedule(period, fragments, min(rng.choice((0, 1, 2)), period - 1), fragments)
        steps = rng.randint(1, 6 * period) if self.number % 7 == 3 else sys.maxsize
        self.rules = replace(self.rules, closing=schedule.rounds(steps - 1))
        return RoundPacing(schedule, steps, self.rules.lockstep, REDUCES * self.timing.reduce_seconds)

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

    def start(self, name: str, fresh: bool = False) -> None:
        """A process of an island begins, from its checkpoint if it has one; `fresh`: the disk is empty."""
        self.starts += 1
        rng = self.rng
        if fresh:
            self.disks.pop(name, None)
        saved, used = self.disks.get(name, (None, 0))
        if saved:
            self.invariants.forget(name, used)
        seconds = self.step_seconds.get(name) or rng.choice(self.speeds)
        if self.number % 5 == 2:
            self.copy_seconds.setdefault(name, rng.choice(COPIES))
        node = Node(self, name, f"s{self.starts}", seconds, saved)
        self.nodes[name] = node
        self.states[node.identity] = saved.outer if saved else seed(SEED)
        self.log(f"{name} starts as {node.identity}, from round {self.states[node.identity].round}")
        node.tick()

    def step(self, node: Node) -> None:
        """An island has made a step, after which it may save."""
        if self.rng.random() < SAVES:
            self.save(node)

    def save(self, node: Node, is_last: bool = False) -> None:
        """An island saves; `is_last`: it has the last state of the run."""
        outer, *others = node.trainer.saved()
        outer = node.member.outer if is_last else outer
        taken = len(self.invariants.taken.get(node.name, []))
        self.disks[node.name] = Checkpoint(outer, *others), taken
        self.log(f"{node.name} has saved {'the last state' if is_last else f'round {outer.round}'}")

    def kill(self, name: str) -> None:
        self.log(f"{name} dies")
        self.nodes[name].alive = False

    def pause(self, name: str) -> None:
        """SIGSTOP, or the machine is suspended."""
        self.log(f"{name} is stopped")
        node = self.nodes[name]
        node.paused, node.paused_at = True, self.now

    def resume(self, name: str) -> None:
        """SIGCONT: what came in the meantime is there at once, or lost. The process's clock may have stood still."""
        node, rng = self.nodes[name], self.rng
        if node.paused:
            self.log(f"{name} goes on")
            node.paused, node.reachable_since = False, self.now
            if rng.random() < 0.7:
                node.behind += self.now - node.paused_at
            kept, node.kept = node.kept, []
            if rng.random() < 0.5 and node.asking:
                asked = node.asking.header.asked
                self.later(0.1, lambda: node.answer(asked, m.ViewFailed("the connection is broken")))
            for event in kept:
                event()
            node.tick()

    # Network.

    def connected(self, one: str, other: str) -> bool:
        """Whether there is a way from one to the other (nodes' names or the coordinator)."""
        return not self.cuts or (one, other) not in self.cuts

    def reaches(self, one: str, other: str) -> bool:
        """Whether data can go between two islands."""
        both = self.connected(one, other) and self.connected(other, one)
        return one == other or (both and not self.bad & {one, other})

    def send(self, source: str, target: str, what: Callable[[], None], most: float = 2.0) -> None:
        """A message: may be lost, late (by at most `most` seconds), repeated."""
        weather, rng = self.weather, self.rng
        for _ in range(1 + (rng.random() < weather.repeated)):
            if self.connected(source, target) and rng.random() >= weather.lost:
                late = rng.random() < weather.late
                self.later(rng.random() * (most if late else weather.delay), what)

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
        if any(own) and node.trainer.fragment != self.pace.schedule.round_fragment(action.round):
            raise BrokenError(f"{node.name} sends a message of another fragment than that of {action.key}")
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
        self.invariants.follow(self.states[node.identity], outer)
        self.invariants.commit(outer, parent)
        self.committed_at = self.now
        node.previous = self.states[node.identity]
        self.states[node.identity] = outer

    def completed(self, node: Node, steps: int, tokens: list[float]) -> None:
        """An island has ended with the last state of the run."""
        self.log(f"{node.name} has completed the run")
        self.final.add(node.member.outer.digest)
        self.complete.add(node.name)
        if len(self.final) > 1:
            raise BrokenError(f"the run ends with other parameters on {node.name}: {self.final}")

    def unrecorded(self, node: Node) -> None:
        """An island has ended without knowing that its state is the last one, or knowing that it is not."""
        self.log(f"{node.name} has not completed the run")
        self.later(1.0, lambda: None if self.nodes[node.name].alive else self.start(node.name))

    def installed(self, node: Node, outer: OuterRecord) -> None:
        self.invariants.publish(outer)
        if outer.digest not in self.final:  # that one wins, however long it is
            self.invariants.install(self.states[node.identity], outer)
        node.previous = self.states[node.identity] = outer

    def published(self, node: Node, outer: OuterRecord) -> None:
        """A member's record of its state is `outer` now; the state is the same."""
        self.invariants.publish(outer)
        self.invariants.follow(self.states[node.identity], outer)
        self.states[node.identity] = outer

    def seen(self, view: View) -> None:
        """A member sees a view: what it means is checked, once."""
        if id(view) in self.seen_views:
            return
        self.seen_views.add(id(view))
        decision = decide(view, self.rules)
        plan = decision.plan
        for header in view.headers:
            if header.electors:
                self.electors[header.generation, header.round] = header.electors
        if isinstance(plan, FormGroup):
            left_out = {member.identity for member in plan.members if member.name in plan.left_out}
            if sound := [n.name for n in self.nodes.values() if n.identity in left_out and not n.has_diverged]:
                raise BrokenError(f"the messages of {sound} are left out: {plan.left_out}")
        if isinstance(plan, NewGeneration) and decision.top:
            if self.rules.majority and plan.waited:
                self._check_survivors(decision.top, frozenset(decision.headers))
            self.invariants.turn(plan.generation, decision.top.generation, plan.waited)
        elif isinstance(plan, Adopt) and plan.renewal and decision.top:
            self.invariants.turn(plan.renewal.generation, decision.top.generation, False)
        elif isinstance(plan, StartFleet):
            living = [node for node in self.nodes.values() if node.alive]
            has_state = any(node.kept or self.states[node.identity].round > NO_ROUND for node in living)
            self.fleets += 1
            self.invariants.begin(plan.generation, has_state or bool(self.disks))

    def _check_survivors(self, top: Header, here: frozenset[str]) -> None:
        """A generation may begin without most of the voters in its view only if these are dead."""
        living = {node.identity for node in self.nodes.values() if node.alive} - here
        left = [each for each in self.electors.get((top.generation, top.round), ()) if each in living]
        if 2 * len(left) > top.voters:
            raise BrokenError(
                f"a generation begins while more than half of the voters live elsewhere: {left} of {top.voters}"
            )

    def leave(self, node: Node) -> None:
        for each in self.coordinators:
            each.leave(node)
