"""An island in the simulated world: a real member, with a model of its engine and of its trainer."""

import hashlib
import random
from typing import TYPE_CHECKING

from gregale.islands.protocol import messages as m
from gregale.islands.protocol.headers import seed
from gregale.islands.protocol.member import Member
from gregale.islands.protocol.standing import Identity
from gregale.islands.simulator.process import Process

if TYPE_CHECKING:
    from gregale.islands.simulator.world import World

SEED = "seed"
LEAST_TICK_SECONDS = 0.01


def hashed(*parts: object) -> str:
    """The digest of a modelled state."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=6).hexdigest()


class Node(Process):
    """A process of an island whose engine and trainer are modelled. It may be paused, and hears nothing then."""

    def __init__(self, world: "World", name: str, session: str, interval: float, step: float):
        self.world, self.interval, self.step_seconds = world, interval, step
        identity = Identity(name, session, "config", "1", (name,))
        member: Member = world.member_class(identity, seed(SEED), world.timing, world.rules, decide=world.decide)
        super().__init__(world, member, LEAST_TICK_SECONDS)
        self.paused, self.final = False, False  # final: its trainer makes no more steps
        self.kept: list[m.Event] = []  # what happened while it was paused
        self.previous = self.member.outer  # the record before the newest one
        self.asked_weight = 0.0
        self.prepared: dict[str, str] = {}
        self.reducing: str | None = None
        self.used, self.position = 0, 0
        self.contribution, self.due_number = "", 0
        self.cut_off_at: float | None = None

    def tell(self, event: m.Event) -> None:
        """An event reaches the member; its actions are carried out."""
        if not self.alive:
            return
        if self.paused:
            self.kept.append(event)
            return
        world = self.world
        actions = self.member.handle(m.Tick(world.now))
        actions += self.member.handle(event)
        if world.trace is not None:
            world.log(f"{self.name}: {event} -> {actions}")
        for action in actions:
            getattr(self, f"_do_{type(action).__name__.lower()}")(action)
        self.wake_in_time()

    def tick(self) -> None:
        """Nothing happens but that time has passed."""
        self.tell(m.Tick(self.world.now))

    def _do_ask(self, action: m.Ask) -> None:
        self.asked_weight = action.header.weight
        self.world.ask(self, action.header)
        self.begin_to_ask(action.header.asked)

    def answer(self, number: int, event: m.Seen) -> None:
        """As any process's; a paused one does not hear it."""
        if not self.paused:
            super().answer(number, event)

    def _do_tellpeers(self, action: m.TellPeers) -> None:
        for name in action.addresses:
            node = self.world.nodes.get(name)
            if node:
                self.world.send(self.name, name, lambda node=node: node.tell(m.Due(action.round)))

    def _do_takesnapshot(self, action: m.TakeSnapshot) -> None:
        self.world.later(self.world.rng.random() * self.step_seconds, lambda: self._snapshot(action.round))

    def _snapshot(self, round: int) -> None:
        if self.paused:
            self.world.later(0.1, lambda: self._snapshot(round))
        if self.paused or not self.alive:
            return
        if not self.final:
            self._train()
        self.final = self.member.leaving
        self.contribution = hashed(self.identity, round, self.used)
        self.tell(m.Snapshot(round, 1.0 + self.world.examples, self.used, self.step_seconds, self.final))

    def _train(self) -> None:
        lease = self.member.outer.ledger.lease(self.name, self.member.holder)
        left = lease.after(self.used).spans if lease else ()
        examples = [example for start, stop in left for example in range(start, stop)][: self.world.examples]
        for example in examples:
            self.world.invariants.consume(example, self.identity)
        self.used += len(examples)

    def _do_reduce(self, action: m.Reduce) -> None:
        self.reducing = action.key
        self.world.reduce(self, action)

    def reduced(self, key: str, digest: str | None, unreachable: tuple[str, ...]) -> None:
        """The engine's reduce ended."""
        if self.reducing != key or not self.alive:
            return
        self.reducing = None
        if digest is None:
            self.tell(m.ReduceFailed(key, unreachable))
        else:
            self.prepared[key] = digest
            self.tell(m.Reduced(key, digest))

    def _do_dropgroup(self, _: m.DropGroup) -> None:
        self.reducing = None

    def _do_discard(self, action: m.Discard) -> None:
        del self.prepared[action.key]

    def _do_commit(self, action: m.Commit) -> None:
        self.world.committed(self, action, self.prepared.pop(action.key))
        self.begin_interval()

    def _do_publish(self, action: m.Publish) -> None:
        self.world.published(self, action.outer)
        if action.outer.round == 0 or self.due_number == 0:
            self.begin_interval()

    def _do_install(self, action: m.Install) -> None:
        self.world.installed(self, action.outer)
        self.begin_interval()

    def begin_interval(self) -> None:
        """The trainer goes on: the next round is due after the interval."""
        self.due_number += 1
        number = self.due_number
        self.world.later(self.interval, lambda: self._due(number))

    def _due(self, number: int) -> None:
        if number == self.due_number and self.alive and not self.member.done:
            self.tell(m.Due())

    def _do_find(self, action: m.Find) -> None:
        self.world.later(
            self.world.rng.uniform(0.01, 0.1), lambda: self.tell(m.Gone(self.world.dead(self.name, action.peers)))
        )

    def _do_heal(self, action: m.Heal) -> None:
        self.world.heal(self, action)

    def _do_note(self, action: m.Note) -> None:
        self.world.log(f"{self.name} says: {action.text}")

    def _do_refused(self, action: m.Refused) -> None:
        self.alive = False

    def _do_left(self, action: m.Left) -> None:
        self.alive = False
        self.cut_off_at = self.world.now


def shuffled(rng: random.Random, values: list) -> list:
    """A copy in random order."""
    return rng.sample(values, len(values))
