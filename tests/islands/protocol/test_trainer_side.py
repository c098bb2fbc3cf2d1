"""When an island is told to hand over a message, to mix a round in, and to wait."""

import pytest

from gregale.islands.protocol import messages as m
from gregale.islands.protocol.trainer_side import Handover, TrainerSide
from gregale.islands.trainer_command import ApplyRound, LoadOuterState, RoundPacing, SendMessage
from gregale.methods.schedule import Schedule


class Side(TrainerSide):
    """With a handover of its own, and the time of the test."""

    def __init__(self, delay: int = 2, lockstep: bool = False, timeout_seconds: float = 1e9, steps: int = 100):
        self.handover, self.now = Handover(), 0.0
        pace = RoundPacing(Schedule(10, 2, delay, 4), steps, lockstep, timeout_seconds)  # rounds every 5 steps
        super().__init__(pace, self.handover)

    def steps(self, count: int, seconds: float = 0.0) -> None:
        for _ in range(count):
            self.now += seconds
            self.stepped(self.now, 0.0)

    def says_due(self, number: int, starved: bool = False) -> bool:
        said = []

        def say(event: m.RoundDue | m.EarlyMessage) -> None:
            said.append(event)
            if self.handover.due and self.handover.sent:
                self.handover.old = True
            self.handover.own = self.handover.due = True

        self.message(number, self.now, say, starved, starved)
        return bool(said)

    def wants(self, number: int) -> None:
        """The member requests a message, as the round is due."""
        self.handover.due = True
        self.handover.want(number)

    def take(self, number: int, is_last: bool = False) -> SendMessage | None:
        return self.message(number, self.now, lambda event: None, is_last, False)

    def sends(self, number: int, weight: float | None = 1.0) -> None:
        self.wants(number)
        self.message_sent(number, self.now)
        if weight is not None:
            self.handover.arrive(m.MessageReady(number, weight, 0))

    def commits(self, number: int, weight: float = 1.0) -> None:
        self.handover.next_round(used=weight > 0)
        self.round_decided(ApplyRound(number, weight), self.now)


@pytest.fixture
def side():
    return Side()


def test_a_round_is_due_once_after_its_steps(side):
    side.steps(4)
    assert not side.says_due(0)
    side.steps(1)
    assert side.says_due(0)
    assert not side.says_due(0)
    starved = Side()
    assert starved.says_due(0, starved=True)
    starved.sends(0, weight=0.0)
    assert not starved.says_due(0, starved=True)


def test_without_data_it_announces_the_round_after_one_that_left_its_message_out(side):
    """No other island may be there to do so."""
    side.steps(5)
    side.sends(0)
    side.commits(0, weight=0.0)
    assert side.arrival(is_last=True) == ApplyRound(0, 0.0)
    assert not side.says_due(1)
    assert side.says_due(1, starved=True)
    assert not side.says_due(1, starved=True)


@pytest.mark.parametrize(("weight", "steps"), [(0.0, 5), (1.0, 5 + 2)])
def test_a_round_is_due_again_as_many_steps_and_tau_after_its_message(side, weight, steps):
    side.sends(0, weight)
    side.steps(steps - 1)
    assert not side.says_due(0)
    side.steps(1)
    assert side.says_due(0)
    assert side.handover.old
    assert not side.says_due(0)


def test_nothing_is_mixed_in_before_tau_steps(side):
    leaver = Side()
    for each in (side, leaver):
        each.sends(0)
        each.commits(0)
    assert leaver.arrival(is_last=True) == ApplyRound(0, 1.0), "for it nothing is early"
    side.steps(1)
    assert side.arrival(is_last=False) is None
    assert not side.must_wait(1, 0.0)  # it may make the step that is missing
    side.steps(1)
    assert side.arrival(is_last=False) == ApplyRound(0, 1.0)
    assert side.all_arrived()


def test_no_message_is_sent_before_the_previous_round_is_mixed_in(side):
    """The message of round 2 is of the fragment of round 0, whose tokens count until it is mixed in."""
    side.sends(0)
    side.commits(0)
    side.wants(1)
    assert side.arrival(is_last=False) is None
    assert side.take(1) is None
    side.steps(2)
    assert side.take(1) is None
    assert side.arrival(is_last=False) == ApplyRound(0, 1.0)
    assert side.take(1) == SendMessage(1)


def test_in_lockstep_the_trainer_waits_tau_steps_even_for_an_early_decision():
    side = Side(lockstep=True)
    side.sends(0)
    side.steps(1)
    assert not side.must_wait(0, 0.0)
    side.steps(1)
    assert side.must_wait(0, 0.0)
    side.commits(0)
    assert side.arrival(is_last=False) == ApplyRound(0, 1.0)
    assert not side.must_wait(1, 0.0)
    side = Side(delay=5, lockstep=True)
    side.sends(0)
    side.steps(20)
    assert not side.says_due(0), "no message is replaced by one of more steps"


def test_in_lockstep_an_island_without_data_hands_over_its_message():
    side = Side(lockstep=True)
    assert side.must_wait(-1, 0.0), "before the start"
    side.wants(0)
    assert side.take(0) is None
    assert side.take(0, is_last=True) == SendMessage(0)


def test_without_delay_the_trainer_waits_at_once_unless_it_contributes_nothing():
    side = Side(delay=0)
    assert not side.must_wait(0, 0.0)
    side.sends(0, weight=None)
    assert side.must_wait(0, 0.0)
    side.sends(0, weight=1.0)
    assert side.must_wait(0, 0.0)
    side.sends(0, weight=0.0)
    assert not side.must_wait(0, 0.0)


@pytest.mark.parametrize("patience", [1e9, 0.0])
def test_the_trainer_waits_for_a_slow_network_but_not_forever(patience):
    side = Side(timeout_seconds=patience)
    side.sends(0)
    side.steps(4)
    assert not side.must_wait(0, 0.0)
    side.steps(1)
    assert side.must_wait(0, 0.0) == (patience > 0)


def test_the_trainer_waits_for_a_round_at_most_twice_the_median_time():
    """Somebody is missing: while that is found out, the island trains on."""
    side = Side(delay=1)
    for number, seconds in enumerate([1.0, 1.0, 9.0]):
        side.sends(number)
        side.now += seconds
        side.commits(number)
        side.steps(1)
        assert side.arrival(is_last=False) is not None
    side.sends(3)
    side.steps(5)
    assert side.must_wait(3, side.now + 1.9)
    assert not side.must_wait(3, side.now + 2.1)


def test_a_message_for_a_decided_round_leaves_the_next_one_wanted(side):
    side.wants(0)
    assert side.take(0) == SendMessage(0)
    side.commits(0, 0.0)
    side.wants(1)
    side.message_sent(0, 0.0)
    side.steps(2)
    assert side.arrival(is_last=False) == ApplyRound(0, 0.0)
    assert side.take(1) == SendMessage(1)


def test_a_message_that_departs_while_another_state_arrives_is_obsolete(side):
    """The trainer has the command already when a thread installs the state, which is of the same round."""
    side.wants(0)
    assert side.take(0) == SendMessage(0)
    side.handover.state_replaced()
    side.round_decided(LoadOuterState(0), 0.0)
    side.wants(0)
    assert side.message_sent(0, 0.0) != side.handover.count
    assert side.handover.wanted == 0
    assert side.arrival(is_last=False) == LoadOuterState(0)
    assert side.take(0) == SendMessage(0)


def test_a_peers_state_replaces_queued_rounds_and_resets_the_steps(side):
    side.steps(5)
    side.commits(0)
    side.round_decided(LoadOuterState(7), 0.0)
    assert side.arrival(is_last=False) == LoadOuterState(7)
    assert side.all_arrived()
    assert not side.says_due(7)


def test_a_message_before_its_round_is_of_the_fragment_left_behind():
    """Rounds fall due every 3 s; a step of this island takes 8 s, and the next two rounds begin within it."""
    side, said = Side(delay=1), []
    handover = side.handover
    handover.fragments, handover.early = 2, True
    side.steps(1, seconds=8.0)
    side.commits(0)
    assert side.arrival(is_last=False) == ApplyRound(0, 1.0)
    for at in (4.0, 7.0):
        handover.fall_due(at)
    handover.next_round(used=False)
    side.message(2, 8.0, said.append, False, False)
    assert said == [m.EarlyMessage(3)], "round 2 is of the fragment of round 0"
    handover.step_seconds = 1.0
    side.message(2, 8.0, said.append, False, False)
    assert len(said) == 1, "no round falls due within a step"


def test_a_message_that_no_round_has_used_waits_for_the_next_of_its_fragment(side):
    handover = side.handover
    handover.fragments = 2
    side.sends(0)
    assert [handover.serves(number) for number in range(4)] == [True, False, True, False]
    side.commits(0, 0.0)
    assert handover.serves(2)
    side.commits(2)
    assert not handover.serves(2)


def test_an_island_that_waits_with_an_early_message_announces_an_overdue_round():
    side = Side(delay=0)
    handover = side.handover
    handover.early = True
    for at in (0.0, 3.0):
        handover.fall_due(at)
    handover.next_round(used=True)
    side.steps(1)
    handover.want(0)
    side.message_sent(0, 3.5)
    assert side.must_wait(0, 4.0)
    side.now = 8.9
    assert not side.says_due(0)
    side.now = 9.0
    assert side.says_due(0)


@pytest.mark.parametrize(
    ("queued", "keeps"),
    [
        (ApplyRound(0, 0.0), True),
        (ApplyRound(0, 1.0), False),
        (LoadOuterState(0), False),
        (LoadOuterState(0, keeps=True), True),
    ],
    ids=["a round without it", "a round with its steps", "a restart", "a state before"],
)
def test_steps_are_kept_unless_an_arrival_in_the_queue_has_them_or_ends_them(side, queued, keeps):
    side.steps(3)
    side.round_decided(queued, 0.0)
    side.round_decided(LoadOuterState(7, keeps=True), 0.0)
    assert side.arrival(is_last=False) == LoadOuterState(7, keeps=keeps)
    assert side.undecided_steps == (3 if keeps else 0)


def test_in_lockstep_no_step_comes_after_the_last_one_however_late_its_round():
    side = Side(delay=3, lockstep=True, steps=11)
    side.steps(5)
    side.sends(1)
    assert not side.must_wait(1, 0.0)
    side.steps(1)
    assert side.must_wait(1, 0.0), "the closing rounds come after one step"
    side.commits(1)
    assert side.arrival(is_last=False) == ApplyRound(1, 1.0)
