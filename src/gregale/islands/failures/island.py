"""A modelled island: a real member of the protocol, with a model of its trainer and of its driver."""

from typing import TYPE_CHECKING

from gregale.islands.failures.trainer import Trainer
from gregale.islands.patience import REDUCES, Patience
from gregale.islands.protocol import messages as m
from gregale.islands.protocol.headers import NO_ROUND, seed
from gregale.islands.protocol.member import Member
from gregale.islands.protocol.standing import Identity
from gregale.islands.simulator.process import Process

if TYPE_CHECKING:
    from gregale.islands.failures.world import World

LEAST_TICK_SECONDS = 0.005  # as the driver


class Island(Process):
    """A process of an island whose trainer and driver are modelled.

    - `told`: the newest round of which a peer has said that it is due
    """

    def __init__(self, world: "World", number: int, session: str):
        self.world, self.number, name = world, number, f"i{number:05d}"
        self.site = world.fleet.sites[number]
        identity = Identity(name, session, "config", "1", (name,))
        member = Member(identity, seed("seed"), world.fleet.timing, world.rules, decide=world.decide)
        super().__init__(world, member, LEAST_TICK_SECONDS)
        self.trainer = Trainer(self.site.step_seconds, world.fleet.schedule.fragments)
        self.told = NO_ROUND
        self.reducing: str | None = None
        self._wanted: int | None = None  # the round whose message is taken at the next boundary, or under way
        self._departed = 0  # steps at the newest message
        self._departed_at: float | None = None  # when its message was taken, while the round is not decided
        self._patience = Patience(REDUCES * world.fleet.timing.reduce_seconds)
        self._interval = 0

    def tell(self, event: m.Event) -> None:
        """An event reaches the member; its actions are carried out."""
        if self.alive:
            self._carry_out(self.member.handle(m.Tick(self.world.now)) + self.member.handle(event))

    def tick(self) -> None:
        """Nothing happens but that time has passed."""
        if self.alive:
            self._carry_out(self.member.handle(m.Tick(self.world.now)))

    def _carry_out(self, actions: list[m.Action]) -> None:
        for action in actions:
            carry_out = getattr(self, f"_do_{type(action).__name__.lower()}", None)
            if carry_out:
                carry_out(action)
        self.wake_in_time()

    # The coordinator and the peers.

    def _do_ask(self, action: m.Ask) -> None:
        self.world.ask(action.header)
        self.begin_to_ask(action.header.asked)

    def _do_tellpeers(self, action: m.TellPeers) -> None:
        self.world.tell_peers(action)

    # The trainer.

    def _do_takesnapshot(self, action: m.TakeSnapshot) -> None:
        self._wanted = action.round
        self._interval += 1  # no word of its own that the round is due
        now = self.world.now
        self.world.later(self.trainer.boundary(now) - now, lambda: self._depart(action.round))

    def _depart(self, number: int) -> None:
        if not self.alive or self._wanted != number:
            return
        fleet, trainer = self.world.fleet, self.trainer
        self._departed = trainer.steps(self.world.now)
        # As the driver: the next message is due and this one not decided, the network is slower than the steps.
        ahead = fleet.interval(number + 1) if fleet.schedule.delay else 0
        trainer.hold(self._departed + ahead)
        self._departed_at = self.world.now
        if ahead:
            interval = self._interval
            self.world.later(self._patience.seconds, lambda: self._train_on(interval))
        weight = self._departed - trainer.marks[fleet.schedule.round_fragment(number)]
        self.tell(m.Snapshot(number, weight, 0, self.site.step_seconds))

    def _train_on(self, interval: int) -> None:
        """The round takes longer than rounds do: who is missing is found out while it trains."""
        if self.alive and interval == self._interval:
            self.trainer.release(self.world.now)

    def _next_interval(self) -> None:
        self._wanted, now = None, self.world.now
        if self._departed_at is not None:
            self._patience.learn(now - self._departed_at)
            self._departed_at = None
        self.trainer.release(now)
        self._interval += 1
        number, steps = self._interval, self._departed + self.world.fleet.interval(self.member.outer.round)
        self.world.later(self.trainer.time_of(steps, now) - now, lambda: self._due(number))

    def _due(self, number: int) -> None:
        if number == self._interval:
            self.tell(m.Due())

    # Rounds.

    def _do_reduce(self, action: m.Reduce) -> None:
        self.reducing = action.key
        self.world.enter(self, action)

    def ended(self, event: m.Reduced | m.ReduceFailed) -> None:
        """The engine's reduce ended."""
        if self.alive and self.reducing == event.key:
            self.reducing = None
            self.tell(event)

    def _do_dropgroup(self, _: m.DropGroup) -> None:
        if self.reducing:
            key, self.reducing = self.reducing, None
            self.world.dropped(self, key)

    def _do_commit(self, action: m.Commit) -> None:
        if action.weight:
            self.trainer.marks[self.world.fleet.schedule.round_fragment(action.outer.round - 1)] += action.weight
        self.world.committed(self, action)
        self._next_interval()

    def _do_publish(self, action: m.Publish) -> None:
        self.world.published(action.outer)
        if not self.trainer.running:
            self._begin()

    def _do_find(self, action: m.Find) -> None:
        self.world.find(self, action)

    def _do_heal(self, action: m.Heal) -> None:
        self.world.heal(self, action)

    def _do_install(self, action: m.Install) -> None:
        self._departed_at = None
        self.world.lose(self)
        self.trainer.discard(self.world.now)
        self._begin()

    def _begin(self) -> None:
        if not self.trainer.running:
            self.trainer.begin(self.world.now)
        self._next_interval()
