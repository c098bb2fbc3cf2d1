"""A model of an island's training loop: steps on leased examples, and between them what the real `TrainerSide` says."""

from gregale.islands.protocol import messages as m
from gregale.islands.protocol.messages import OuterRecord
from gregale.islands.protocol.trainer_side import TrainerSide
from gregale.islands.state import DataLeases
from gregale.islands.trainer_command import ApplyRound, LoadOuterState, RoundPacing, SendMessage, TrainerCommand

BATCH = 2  # examples of a step
DOWN_SECONDS = 0.1  # for a message from the devices to the host, at most
LOOK_SECONDS = 0.5  # between two looks of one that waits, if nothing happens


class Trainer:
    """The loop of one process.

    - `node`: the `Node` of the process
    - `side`: what is real of it
    - `message`: names the content of the newest message
    - `fragment`: of that message
    - `waited`: the seconds for which the loop has waited
    - `factor`: by which its parameters move too far; None: they are not finite
    """

    def __init__(self, node, pace: RoundPacing, step_seconds: float, used: int, saved=None):
        self._node, self._pace, self._step_seconds = node, pace, step_seconds
        self.side = TrainerSide(pace, node.member.handover, node.clock, saved.steps if saved else 0)
        self.stage = node.world.rules.stage_at(node.member.outer.round)
        self._leases = DataLeases(node.name, node.member.holder, BATCH, used, self.stage)
        # Since this island contributed to each.
        self._tokens = list(saved.tokens) if saved else [0.0] * pace.schedule.fragments
        self._given = [-each for each in self._tokens]  # contributed, less those of the checkpoint
        self._made = 0
        self._outer = node.member.outer  # at the last command
        self._batches = self._looks = 0
        self._is_busy = self._is_final = False
        self.message, self.fragment, self._departed = "", -1, 0.0
        self._idle_since, self.waited = node.clock, 0.0
        self.factor: float | None = 1.0

    def leased(self, outer: OuterRecord, holder: str) -> None:
        self._leases.update(outer.ledger, holder)

    def wake(self) -> None:
        """Something has happened: goes on, if it waits and does not have to any more."""
        if not self._is_busy:
            self._between_steps(starved=False)

    def _between_steps(self, starved: bool) -> None:
        node, now = self._node, self._node.clock
        if not node.hears:
            return
        self._is_busy = True
        while (order := self._order(starved)) is not None:
            self._follow(order)
        self._is_busy = False
        if self._is_final or node.member.done:
            return
        is_complete = node.member.is_complete and self.side.all_arrived()
        if is_complete and node.member.may_end:
            self._is_final = True
            node.complete(self._made // BATCH, self._tokens)
            return
        if is_complete or node.member.leaving or self.side.must_wait(node.member.outer.round, now):
            self._look_again()
        elif self._leases.is_empty() and not starved:
            self._between_steps(starved=True)
        elif (first := self._leases.take()) is not None:
            for example in range(first, first + BATCH):
                node.world.invariants.consume(example, node.identity)
            node.world.invariants.is_of_stage(first, self.stage, node.member.outer.ledger)
            self._is_busy = True
            self.waited += node.clock - self._idle_since
            node.world.later(self._step_seconds, self._stepped)

    def _order(self, starved: bool) -> TrainerCommand | None:
        """As `Driver._order`."""
        node = self._node
        starved = starved and self._leases.is_empty()
        is_last, number = node.member.leaving or starved, node.member.outer.round
        if (arrival := self.side.arrival(is_last)) is not None:
            return arrival
        if node.member.is_complete:
            return None
        return self.side.message(number, node.clock, node.tell, is_last, starved)

    def _look_again(self) -> None:
        self._looks += 1
        looks = self._looks
        self._node.world.later(LOOK_SECONDS, lambda: self.wake() if looks == self._looks else None)

    def _stepped(self) -> None:
        if not self._node.hears:
            self._node.world.later(LOOK_SECONDS, self._stepped)  # it is stopped in the middle of it
            return
        self._is_busy, self._idle_since = False, self._node.clock
        self._batches += 1
        self._made += BATCH
        self._tokens = [tokens + BATCH for tokens in self._tokens]
        self.side.stepped(self._node.clock, self.waited)
        self._node.world.step(self._node)
        self._between_steps(starved=False)

    def saved(self) -> tuple[OuterRecord, str, int, int, tuple[float, ...], int]:
        """The values of a checkpoint between two steps."""
        used = self._leases.used_after(self._batches)
        return self._outer, self._leases.holder, used, self.side.undecided_steps, tuple(self._tokens), self.stage

    def _follow(self, order: TrainerCommand) -> None:
        schedule, self._outer = self._pace.schedule, self._node.member.outer
        if isinstance(order, SendMessage):
            self._depart(order.round)
        elif isinstance(order, ApplyRound) and order.weight:
            fragment = schedule.round_fragment(order.round)
            self._tokens[fragment] -= self._departed
            self._given[fragment] += self._departed
            node = self._node
            node.world.invariants.has_made(self._given[fragment], self._made, node.identity)
        elif isinstance(order, LoadOuterState) and not order.keeps:
            self.factor = 1.0
            self._tokens = [0.0] * schedule.fragments
        if not isinstance(order, SendMessage):
            self._begin_stage(order.round if isinstance(order, LoadOuterState) else order.round + 1)

    def _begin_stage(self, round: int) -> None:
        """As the program: the stage of the outer parameters that have arrived."""
        stage = self._node.world.rules.stage_at(round)
        if stage != self.stage:
            self.stage, self._batches = stage, 0
            self._leases.begin_stage(stage, BATCH)

    def _depart(self, number: int) -> None:
        node = self._node
        count = self.side.message_sent(number, node.clock)
        self._is_final = node.member.leaving
        fragment = self._pace.schedule.round_fragment(number)
        self._departed = weight = self._tokens[fragment]
        used = self._leases.used_after(self._batches)
        norm = None if self.factor is None else self.factor * weight**0.7 * node.world.rng.uniform(0.5, 2.0)
        shot = m.MessageReady(number, weight, used, self._is_final, norm)
        seconds = node.world.copy_seconds.get(node.name) or node.world.rng.random() * DOWN_SECONDS
        node.world.later(seconds, lambda: self._down(count, shot, fragment, seconds))

    def _down(self, count: int, shot: m.MessageReady, fragment: int, seconds: float) -> None:
        self.side.copied(seconds)
        if count == self._node.member.handover.count:
            self.fragment, self.message = fragment, f"{self._node.identity} {count}"
            self._node.tell(shot)
