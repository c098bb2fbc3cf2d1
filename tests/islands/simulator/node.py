"""An island in the simulated world: a real member, with a model of its engine and of its trainer."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from gregale.islands.protocol import messages as m
from gregale.islands.protocol.choice import Choice
from gregale.islands.protocol.member import Identity, Member
from gregale.islands.protocol.membership import BEATS_PER_TIMEOUT, Record
from gregale.islands.protocol.messages import NO_ROUND, OuterRecord, seed
from gregale.islands.trainer_command import ApplyRound, LoadOuterState
from tests.islands.simulator.trainer import BATCH, Trainer

SEED = "seed"
LEAST_TICK_SECONDS = 0.01


def hashed(*parts: object) -> str:
    """The digest of a modelled state."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=6).hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """What an island's disk has, as of one of its steps: the record of the outer state, and `Driver.to_save`."""

    outer: OuterRecord
    holder: str
    used: int
    steps: int
    tokens: tuple[float, ...]
    stage: int


class Node:
    """A process of an island, which ends with its death or when it left. It may be paused, and hears nothing then.

    - `world`: the `World` in which it runs
    - `behind`: seconds by which its clock differs from the world's
    - `asking`: the request whose answer is awaited, if any
    """

    def __init__(self, world, name: str, session: str, step_seconds: float, saved: Checkpoint | None = None):
        self.world, self.name, self.identity = world, name, f"{name}/{session}"
        batches = (BATCH,) * (1 + len(world.rules.stages))
        identity = Identity(name, session, "config", "1", (name,), batches)
        outer, holder = (saved.outer, saved.holder) if saved else (seed(SEED), "")
        used = saved.used if saved and saved.stage == world.rules.stage_at(outer.round) else 0
        self.behind = -world.rng.uniform(0, 20)
        self.member: Member = world.member_class(identity, outer, world.timing, world.rules, holder, used)
        self.trainer: Trainer = world.trainer_class(self, world.pace, step_seconds, used, saved)
        self.alive, self.paused, self.paused_at = True, False, 0.0
        self.reachable_since = world.now  # when it was last paused, cut off, or started
        self.asking: m.RequestView | None = None
        self.choice = Choice(len(world.coordinators), world.timing.heartbeat_seconds)
        self._choice = 0, 0, 0  # of the newest request
        self._sends = self.beats = 0
        self.doom: str | None = None  # the kind of action at which it dies
        self.kept: list[Callable[[], None]] = []  # what happened while it was paused
        self.previous = self.member.outer  # the record before the newest one
        self.promised: tuple[float, str] = (0.0, "")  # weight and content of the message in its newest ask
        self.has_diverged = False
        self.prepared: dict[str, str] = {}
        self.reducing: str | None = None
        self._wake_at = math.inf
        self._heartbeat, self._answered = m.Heartbeat(), 0
        self.in_fleet_since = math.inf
        self._finished: tuple[int, list[float]] | None = None
        self._beat()

    @property
    def clock(self) -> float:
        return self.world.now - self.behind

    def tell(self, event: m.Event) -> None:
        """An event reaches the member; its actions are carried out."""
        if not self.alive:
            return
        if self.paused:
            self.kept.append(lambda: self.tell(event))
            return
        world = self.world
        if isinstance(event, m.ViewReceived):
            world.seen(event.view)
        actions = self.member.handle(m.Tick(self.clock))
        actions += self.member.handle(event)
        if world.trace is not None:
            world.log(f"{self.name}: {event} -> {actions}")
        for action in actions:
            if type(action).__name__ == self.doom:
                world.kill(self.name)
            if not self.alive:
                return
            self._carry_out(action)
        if (verdict := self.member.verdict) is not None:
            self._end(verdict)
        self._wake_in_time()
        self.trainer.wake()

    def tick(self) -> None:
        """Nothing happens but that time has passed."""
        self.tell(m.Tick(self.clock))

    @property
    def to_record(self) -> Record | None:
        return self.choice.to_record(self.member.saved)

    @property
    def hears(self) -> bool:
        return self.alive and not self.paused

    def _wake_in_time(self) -> None:
        """The member hears of the time when it needs to, if nothing else happens before."""
        at = max(self.member.next_tick() + self.behind, self.world.now + LEAST_TICK_SECONDS)
        if self.alive and at < self._wake_at:
            self._wake_at = at
            self.world.later(at - self.world.now, lambda: self._woken(at))

    def _woken(self, at: float) -> None:
        if at == self._wake_at:
            self._wake_at = math.inf
            self.tick()

    def _request_view(self, action: m.RequestView) -> None:
        self.promised = action.header.weight, self.trainer.message
        self._choice = self.choice.request(action.needed, action.header.round == NO_ROUND)
        self._send(action)

    def _send(self, request: m.RequestView) -> None:
        self.asking = request
        self._sends += 1
        sends = self._sends
        index, term, needed = self._choice
        self.world.coordinators[index].ask(self, request, term, needed)
        self.world.later(self.member.timing.ask_seconds, lambda: self._give_up(request, sends))

    def _give_up(self, request: m.RequestView, sends: int) -> None:
        if self.asking is request and self._sends == sends and self.alive:
            self.answer(request.header.asked, m.ViewFailed("no answer"))

    def answer(self, number: int, event: m.ViewReceived | m.ViewFailed, index: int = 0, term: int = 0) -> None:
        """The answer to a request arrives, or the process gives it up; one that is paused hears it later."""
        if term:
            self.choice.told(index, term)
        if self.paused:
            self.kept.append(lambda: self.answer(number, event))
        elif self.asking and self.asking.header.asked == number:
            self.asking = None
            self.tell(event)

    def repeat(self, number: int) -> None:
        """The coordinator confirms that it holds a request."""
        if self.paused:
            self.kept.append(lambda: self.repeat(number))
        elif self.asking and self.asking.header.asked == number and self.alive:
            self._send(self.asking)

    def _beat(self) -> None:
        if not self.alive:
            return
        if not self.paused:
            self.beats += 1
            beats = self.beats
            for each in self.world.coordinators:
                is_met = self.choice.is_heard(each.index, self.clock)
                is_in_fleet = self.in_fleet_since <= self.world.now or self.member.is_complete
                round = self.member.outer.round if is_in_fleet else NO_ROUND
                each.beat(self, round, each.index == self.choice.current, is_met)
            if self.choice.look(self.clock) and self.asking:
                self.answer(self.asking.header.asked, m.ViewFailed("another coordinator is chosen"))
            if beats % BEATS_PER_TIMEOUT == 0:
                self.world.later(self.member.timing.network_seconds, lambda: self._missed(beats))
        self.world.later(self.member.timing.heartbeat_seconds / BEATS_PER_TIMEOUT, self._beat)

    def _missed(self, beats: int) -> None:
        if self._answered < beats:
            self.heartbeat(self._answered, m.Heartbeat("no answer"))

    def heartbeat(
        self,
        beats: int,
        event: m.Heartbeat,
        index: int = 0,
        hears: int = 0,
        term: int = 0,
        record: Record | None = None,
    ) -> None:
        """The result of a heartbeat; only a new one of the chosen coordinator matters."""
        if not event.error:
            self.choice.answered(index, hears, self.clock, record)
            self.choice.told(index, term)
            if index != self.choice.current:
                return
        self._answered = max(self._answered, beats)
        _, state = self.choice.recorded or (0, "")
        event = replace(event, recorded=state)
        if event != self._heartbeat:
            self._heartbeat = event
            self.tell(event)

    def _carry_out(self, action: m.Action) -> None:
        world = self.world
        match action:
            case m.RequestView():
                self._request_view(action)
            case m.AnnounceRound(addresses, round):
                for name in addresses:
                    node = world.nodes.get(name)
                    if node and world.reaches(self.name, name):
                        world.send(self.name, name, lambda node=node: node.tell(m.RoundDue(round)))
            case m.RequestMessage():
                pass  # the trainer's side finds it in the handover
            case m.Reduce(key):
                self.reducing = key
                world.reduce(self, action)
            case m.DropGroup():
                self.reducing = None
            case m.Discard(key):
                del self.prepared[key]
            case m.Commit(key, outer, weight):
                world.committed(self, action, self.prepared.pop(key))
                self._take_over(outer)
                self.trainer.side.round_decided(ApplyRound(outer.round - 1, weight), self.clock)
            case m.Publish(outer):
                world.published(self, outer)
                self._take_over(outer)
            case m.Install(outer, keeps):
                world.installed(self, outer)
                self._take_over(outer)
                self.trainer.side.round_decided(LoadOuterState(outer.round, keeps=keeps), self.clock)
            case m.Reset():
                self.trainer.side.round_decided(LoadOuterState(self.member.outer.round), self.clock)
            case m.ProbePeers(peers):
                seconds = world.rng.uniform(0.01, 0.1)
                world.later(seconds, lambda: self.tell(m.PeersDead(world.dead(self.name, peers))))
            case m.Heal():
                world.heal(self, action)
            case m.LogLine(text) | m.LeftOut(text):
                world.log(f"{self.name} says: {text}")
            case m.Rejected():
                self.alive = False
            case m.LeaveDone():
                if self.member.is_complete:
                    world.save(self, is_last=True)
                self.alive = False
                world.leave(self)

    def reduced(self, key: str, digest: str | None, unreachable: tuple[str, ...]) -> None:
        if self.reducing != key or not self.alive:
            return
        self.reducing = None
        if digest is None:
            self.tell(m.ReduceFailed(key, unreachable))
        else:
            self.prepared[key] = digest
            self.tell(m.Reduced(key, digest))

    def _take_over(self, outer: OuterRecord) -> None:
        self.in_fleet_since = min(self.in_fleet_since, self.world.now)
        self.trainer.leased(outer, self.member.holder)

    def complete(self, steps: int, tokens: list[float]) -> None:
        """The run is complete: the process saves, and ends once that is recorded.

        - `steps`: that it has made
        - `tokens`: by fragment, which no round has
        """
        self._finished = steps, tokens
        self.world.save(self, is_last=True)
        self.tell(m.Saved())

    def _end(self, is_last: bool) -> None:
        """The process ends: with exit code 0 if its state is the last one of the run."""
        self.alive = False
        self.world.leave(self)
        if is_last and self._finished:
            self.world.completed(self, *self._finished)
        else:
            self.world.unrecorded(self)
