"""The modelled world: a clock, a coordinator, links, and islands that die and come back.

Time is the protocol's own: real members decide, with the coordinator's real rules. The model adds what things take:

- an inner step takes its site's time; a snapshot is taken at the next step boundary, copying it takes nothing;
- a reduce begins when all members have entered it. Each sends (R - 1) / R of the message in the first leg (not with
  weight 0) and as much in the second, and receives as much; the slowest link decides;
- a member that dies breaks the reduce that it is in: the others know after `NOTICE_SECONDS`. The coordinator finds it
  missing after `heartbeat_seconds`;
- a new process asks for a view as soon as it is there, and fetches the state at the speed of its own link: what
  changes meanwhile is fetched again.

Nothing is lost on the way, nobody is cut off, and the coordinator does not die: that is the matter of the simulator of
the protocol (`gregale.islands.simulator`).
"""

import heapq
import math
from dataclasses import dataclass, field

from gregale.islands.failures.fleet import Fleet, Outage
from gregale.islands.failures.island import Island
from gregale.islands.failures.outcome import IslandsOutcome, Recovery
from gregale.islands.protocol import messages as m
from gregale.islands.protocol.decision import decide
from gregale.islands.protocol.headers import NO_ROUND, Header, Outer, View
from gregale.islands.protocol.membership import Ask, Formed, Membership
from gregale.islands.protocol.plans import Decision
from gregale.islands.protocol.settings import Rules
from gregale.islands.simulator.process import Clock

NOTICE_SECONDS = 0.5  # measured: all survivors know of a kill -9 within 0.4 s
COORDINATOR_TICK_SECONDS = 0.1


@dataclass
class Exchange:
    """A reduce: who is in it so far, when the last one entered, and whether it has ended."""

    action: m.Reduce
    inside: list[Island] = field(default_factory=list)
    members: frozenset[str] = frozenset()
    began: float | None = None
    seconds: float = 0.0
    sent_bytes: float = 0.0
    over: bool = False


@dataclass
class Books:
    """What is counted, by all processes of all islands."""

    busy: float = 0.0
    useful_steps: float = 0.0
    lost: float = 0.0
    waiting: float = 0.0
    sent_bytes: float = 0.0
    state_bytes: float = 0.0
    taking_part: int = 0
    rounds: int = 0
    failed_reduces: int = 0
    repeated_reduces: int = 0
    reduced: int = NO_ROUND  # the round of the newest reduce that ended well
    deaths: int = 0
    generation: int = 1
    rejoins: list[float] = field(default_factory=list)
    commits: list[float] = field(default_factory=list)


class World(Clock):
    """One run of a fleet for `seconds` from its beginning."""

    def __init__(self, fleet: Fleet, outages: tuple[Outage, ...], seconds: float):
        super().__init__()
        self.fleet, self.outages, self.seconds = fleet, outages, seconds
        self.rules = Rules(fleet.minimum, start=len(fleet.sites))
        self._processes = 0
        self._coordinator = Membership(1, fleet.timing.join_seconds, math.inf)  # `_missed` says who is silent
        self._healthy, self._polling = set[str](), False
        self._living: dict[str, Island] = {}  # by identity
        self._exchanges: dict[str, Exchange] = {}
        self._last_key, self._told = "", NO_ROUND
        self._decided: tuple[View | None, Decision | None] = (None, None)
        self._began: float | None = None
        self._books = Books()
        self._waiting_to_rejoin: dict[int, list[float]] = {}
        self._waiting_for_commit: list[float] = []

    def run(self) -> IslandsOutcome:
        """Runs it; the same every time."""
        for number in range(len(self.fleet.sites)):
            self._start(number)
        while self._began is None or self.now < self._began + self.seconds:
            at, _, what = heapq.heappop(self.queue)
            self.now = at if self._began is None else min(at, self._began + self.seconds)
            if at == self.now:
                what()
        return self._outcome()

    # Processes.

    def _start(self, number: int) -> None:
        self._processes += 1
        island = Island(self, number, f"s{self._processes}")
        self._living[island.identity] = island
        self._healthy.add(island.identity)
        self._coordinator.beat(island.name, island.member.identity.session, self.now)
        island.tick()

    def _die(self, outage: Outage) -> None:
        island = next((each for each in self._living.values() if each.number == outage.island), None)
        self._books.deaths += 1
        self._waiting_to_rejoin.setdefault(outage.island, []).append(self.now)
        self._waiting_for_commit.append(self.now)
        if island:
            self._end(island)
        self.later(outage.back - outage.death, lambda: self._start(outage.island))

    def _end(self, island: Island) -> None:
        island.alive = False
        del self._living[island.identity]
        self.lose(island)
        self._close(island)
        for exchange in self._exchanges.values():
            if island.identity in exchange.members:
                self._break(exchange, island.name)
        self.later(self.fleet.timing.heartbeat_seconds, lambda: self._missed(island))

    def lose(self, island: Island) -> None:
        """What it has not contributed, it never will."""
        if island.trainer.running:
            lost = island.trainer.pending(self.now)
            self._books.lost += lost
            self._books.useful_steps -= lost / island.site.step_seconds

    def _close(self, island: Island) -> None:
        self._books.busy += island.trainer.busy(self.now)
        self._books.useful_steps += island.trainer.progress(self.now)
        self._books.waiting += island.trainer.waited(self.now)

    # The coordinator.

    def ask(self, header: Header) -> None:
        """A member asks for a view."""
        self.later(self.fleet.latency_seconds, lambda: self._asked(header))

    def _asked(self, header: Header) -> None:
        if header.identity in self._healthy:
            self._coordinator.ask(Ask(header.name, header.session, header.asked, header), self.now)
            self._poll_soon()

    def _missed(self, island: Island) -> None:
        self._healthy.discard(island.identity)
        self._coordinator.leave(island.name, island.member.identity.session)
        self._poll_soon()

    def _poll_soon(self) -> None:
        # A view takes all of the last one or more than half of the healthy ones: without them there is nothing to ask.
        asking, last = len(self._coordinator.pending), self._coordinator.last
        enough = 2 * asking > len(self._healthy) or (last is not None and asking >= len(last))
        if asking and enough and not self._polling:
            self._polling = True
            self.later(COORDINATOR_TICK_SECONDS, self._poll)

    def _poll(self) -> None:
        self._polling = False
        formed = next((answer.view for answer in self._coordinator.tick(self.now) if answer.view), None)
        if formed is None:
            self._poll_soon()
        else:
            self.later(self.fleet.latency_seconds, lambda: self._answer(formed))

    def _answer(self, formed: Formed) -> None:
        view = View(formed.id, tuple(ask.header for ask in formed.asks))
        seen = m.Seen(view)
        for header in view.headers:
            island = self._living.get(header.identity)
            if island:
                island.answer(header.asked, seen)

    def decide(self, view: View, rules: Rules) -> Decision:
        """The members' decision, once for a view."""
        known, decision = self._decided
        if known is not view or decision is None:
            decision = decide(view, rules)
            self._decided = (view, decision)
        return decision

    def tell_peers(self, action: m.TellPeers) -> None:
        """All that were in the view of who says so hear that a round is due. Who has heard it does not hear it again:
        it would do nothing.
        """
        self.later(self.fleet.latency_seconds, lambda: self._tell(action))

    def _tell(self, action: m.TellPeers) -> None:
        deaf = [each for each in self._living.values() if each.told < action.round]
        if deaf:
            names = set(action.addresses)
            for island in deaf:
                if island.name in names:
                    island.told = action.round
                    island.tell(m.Due(action.round))

    # Rounds.

    def enter(self, island: Island, action: m.Reduce) -> None:
        """A member enters a reduce; it goes on when all are there."""
        exchange = self._exchanges.get(action.key)
        if exchange is None:
            self._exchanges = {key: each for key, each in self._exchanges.items() if not each.over}
            members = frozenset(peer.identity for peer in action.members)
            exchange = self._exchanges[action.key] = Exchange(action, members=members)
            dead = [peer.name for peer in action.members if peer.identity not in self._living]
            if dead:
                self._break(exchange, dead[0])
        exchange.inside.append(island)
        if exchange.over:
            self.later(NOTICE_SECONDS, lambda: island.ended(m.ReduceFailed(action.key)))
        elif len(exchange.inside) == len(action.members):
            self._exchange(exchange)

    def _exchange(self, exchange: Exchange) -> None:
        weights, leg = exchange.action.weights, self.fleet.leg_bytes(len(exchange.inside))
        contributing = sum(weight > 0 for weight in weights)
        exchange.began, exchange.sent_bytes = self.now, leg * (contributing + len(weights))
        slowest = min(island.site.bytes_per_second for island in exchange.inside)
        exchange.seconds = 2 * (leg / slowest + self.fleet.latency_seconds)
        self.later(exchange.seconds, lambda: self._reduced(exchange))

    def _reduced(self, exchange: Exchange) -> None:
        if exchange.over:
            return
        exchange.over = True
        books = self._books
        books.sent_bytes += exchange.sent_bytes
        books.repeated_reduces += exchange.action.round == books.reduced
        books.reduced = exchange.action.round
        for island in exchange.inside:
            island.ended(m.Reduced(exchange.action.key, f"result of {exchange.action.key}"))

    def _break(self, exchange: Exchange, name: str) -> None:
        if exchange.over:
            return
        exchange.over = True
        self._books.failed_reduces += 1
        if exchange.began is not None and exchange.seconds:
            self._books.sent_bytes += exchange.sent_bytes * (self.now - exchange.began) / exchange.seconds
        self.later(NOTICE_SECONDS, lambda: self._broken(exchange, m.ReduceFailed(exchange.action.key, (name,))))

    def _broken(self, exchange: Exchange, failed: m.ReduceFailed) -> None:
        for island in exchange.inside:
            island.ended(failed)

    def dropped(self, island: Island, key: str) -> None:
        """A member lets go of a reduce: it took too long, or is of no use."""
        if key in self._exchanges:
            self._break(self._exchanges[key], island.name)

    def committed(self, island: Island, action: m.Commit) -> None:
        """A member commits."""
        books = self._books
        if action.key != self._last_key:
            self._last_key = action.key
            books.rounds += 1
            books.commits += [self.now - death for death in self._waiting_for_commit]
            self._waiting_for_commit = []
        books.taking_part += 1
        books.generation = max(books.generation, action.outer.generation.number)
        if action.weight and island.number in self._waiting_to_rejoin:
            books.rejoins += [self.now - death for death in self._waiting_to_rejoin.pop(island.number)]

    def published(self, outer: Outer) -> None:
        """A member has a new record of its state: the fleet began, or turned a generation."""
        self._books.generation = max(self._books.generation, outer.generation.number)
        if self._began is None:
            self._began = self.now
            for outage in self.outages:
                self.later(outage.death, lambda outage=outage: self._die(outage))

    def find(self, island: Island, action: m.Find) -> None:
        """A member asks which of those that it misses are dead: hosts live on, and refuse it."""
        dead = frozenset(peer.identity for peer in action.peers if peer.identity not in self._living)
        self.later(2 * self.fleet.latency_seconds, lambda: island.tell(m.Gone(dead)))

    # Joiners.

    def heal(self, island: Island, action: m.Heal) -> None:
        """A joiner fetches the state of peers."""
        sources = [self._living[peer.identity] for peer in action.sources if peer.identity in self._living]
        self._fetch(island, sources, self.fleet.outer_bytes + self.fleet.inner_bytes)

    def _fetch(self, island: Island, sources: list[Island], size: float) -> None:
        sources = [source for source in sources if source.alive]
        if not sources:
            island.tell(m.HealFailed("no source answers"))
            return
        self._books.state_bytes += size
        speed = min(island.site.bytes_per_second, sum(source.site.bytes_per_second for source in sources))
        number = sources[0].member.outer.round
        seconds = size / speed + 2 * self.fleet.latency_seconds
        self.later(seconds, lambda: self._fetched(island, sources, number))

    def _fetched(self, island: Island, sources: list[Island], number: int) -> None:
        if not island.alive:
            return
        living = [source for source in sources if source.alive]
        rounds = living[0].member.outer.round - number if living else 0
        if rounds:
            fragments = self.fleet.schedule.fragments
            self._fetch(island, living, self.fleet.outer_bytes * min(rounds, fragments) / fragments)
        elif living:
            island.tell(m.Healed(living[0].member.outer))
        else:
            island.tell(m.HealFailed("no source answers"))

    # The end.

    def _outcome(self) -> IslandsOutcome:
        assert self._began is not None
        for island in self._living.values():
            self._close(island)
        books, fleet = self._books, self.fleet
        all_seconds = self.seconds * len(fleet.sites)
        down = sum(min(outage.back, self.seconds) - outage.death for outage in self.outages)
        unfinished = sum(map(len, self._waiting_to_rejoin.values()))
        return IslandsOutcome(
            seconds=self.seconds,
            deaths=books.deaths,
            goodput=(books.busy - books.lost) / all_seconds,
            tokens=books.useful_steps / (self.seconds * fleet.steps_per_second()),
            lost=books.lost / all_seconds,
            down=down / all_seconds,
            joining=max(0.0, 1 - (books.busy + books.waiting + down) / all_seconds),  # the rest
            waiting=books.waiting / all_seconds,
            rounds=books.rounds,
            failed_reduces=books.failed_reduces,
            repeated_reduces=books.repeated_reduces,
            bytes_per_round=books.sent_bytes / books.taking_part if books.taking_part else 0.0,
            state_bytes=books.state_bytes,
            generations=books.generation - 1,
            rejoin=Recovery.of(books.rejoins, unfinished),
            commit=Recovery.of(books.commits, len(self._waiting_for_commit)),
        )
