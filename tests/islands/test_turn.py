"""When an island is told to hand over a message, to mix a round in, and to wait."""

from __future__ import annotations

from types import SimpleNamespace

from gregale.islands import turn as turns
from gregale.islands.orders import Arrive, Pace, Restart, Take
from gregale.islands.turn import Turn
from gregale.methods.schedule import Schedule


def turn(delay: int = 2, lockstep: bool = False, patience_seconds: float = 1e9) -> Turn:
    return Turn(Pace(Schedule(10, 2, delay, 4), 100, lockstep, patience_seconds))  # rounds every 5 steps


def steps(of: Turn, count: int) -> None:
    for _ in range(count):
        of.stepped()


def test_a_round_is_due_once_after_its_steps():
    one = turn()
    steps(one, 4)
    assert not one.is_due(0)
    one.stepped()
    assert one.is_due(0)
    assert not one.is_due(0)


def test_nothing_is_mixed_in_before_tau_steps():
    one = turn(delay=2)
    one.departed(0, 0)
    one.decided(Arrive(0, 1.0))
    one.stepped()
    assert one.arrival(leaving=False) is None
    assert not one.must_wait(1)  # it may make the step that is missing
    one.stepped()
    assert one.arrival(leaving=False) == Arrive(0, 1.0)
    assert one.all_arrived()


def test_no_message_departs_before_the_round_before_it_is_mixed_in():
    """The message of round 2 is of the fragment of round 0, whose tokens count until it is mixed in."""
    one = turn(delay=2)
    one.departed(0, 0)
    one.decided(Arrive(0, 1.0))
    one.wants(1)
    assert one.arrival(leaving=False) is None
    assert one.message() is None
    steps(one, 2)
    assert one.message() is None
    assert one.arrival(leaving=False) == Arrive(0, 1.0)
    assert one.message() == Take(1)


def test_who_leaves_makes_no_more_steps_so_nothing_is_early():
    one = turn(delay=2)
    one.decided(Arrive(0, 1.0))
    assert one.arrival(leaving=True) == Arrive(0, 1.0)


def test_in_lockstep_it_waits_tau_steps_after_its_message_also_for_a_decision_that_came_early():
    one = turn(delay=2, lockstep=True)
    one.departed(0, 0)
    steps(one, 1)
    assert not one.must_wait(0)
    one.stepped()
    assert one.must_wait(0)
    one.decided(Arrive(0, 1.0))
    assert one.arrival(leaving=False) == Arrive(0, 1.0)
    assert not one.must_wait(1)


def test_without_delay_it_waits_at_once():
    one = turn(delay=0)
    assert not one.must_wait(0)
    one.departed(0, 0)
    assert one.must_wait(0)


def test_a_network_that_is_slower_than_the_steps_is_waited_for_but_not_for_ever():
    patient, impatient = turn(), turn(patience_seconds=0)
    for each in (patient, impatient):
        each.departed(0, 0)
        steps(each, 4)
        assert not each.must_wait(0)
        each.stepped()
    assert patient.must_wait(0)
    assert not impatient.must_wait(0)


def test_a_round_that_takes_twice_the_usual_time_is_waited_for_no_longer(monkeypatch):
    """Somebody is missing: while that is found out, the island trains on."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(turns, "time", SimpleNamespace(monotonic=lambda: clock.now))
    one = turn(delay=1)
    for number, seconds in enumerate([1.0, 1.0, 9.0]):
        one.departed(number, number)
        clock.now += seconds
        one.decided(Arrive(number, 1.0))
        one.stepped()
        assert one.arrival(leaving=False) is not None
    one.departed(3, 3)
    steps(one, 5)
    clock.now += 1.9
    assert one.must_wait(3)
    clock.now += 0.2
    assert not one.must_wait(3)


def test_a_message_for_a_round_that_was_decided_meanwhile_leaves_the_next_one_wanted():
    one = turn()
    one.wants(0)
    assert one.message() == Take(0)
    one.decided(Arrive(0, 0.0))
    one.wants(1)
    one.departed(0, 1)
    steps(one, 2)
    assert one.arrival(leaving=False) == Arrive(0, 0.0)
    assert one.message() == Take(1)


def test_a_peers_state_replaces_what_had_not_arrived():
    one = turn()
    one.decided(Arrive(0, 1.0))
    one.decided(Restart(7))
    assert one.arrival(leaving=False) == Restart(7)
    assert one.all_arrived()


def test_before_the_start_it_waits():
    assert turn().must_wait(-1)
