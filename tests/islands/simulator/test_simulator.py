"""Random schedules of faults break no invariant, and planted mistakes do."""

from contextlib import suppress
from dataclasses import replace

import pytest

from gregale.islands.protocol.member import Member
from gregale.islands.protocol.messages import WAN
from tests.islands.simulator.invariants import BrokenError
from tests.islands.simulator.schedules import Outcome, begin, is_found, run

SCHEDULES = 100


def commits_alone(self, event, original=Member._on_reduced):
    """Commits what it holds without asking whether the others do."""
    original(self, event)
    if self._held:
        self._commit(None)


def divides_by_old_weights(self, view, plan, original=Member._form):
    """Uses the weights of the quorum before, as long as their number fits."""
    now, self.old = getattr(self, "old", ()), plan.weights
    original(self, view, replace(plan, weights=now) if len(now) == len(plan.weights) else plan)


def heals_from_stale_source(self, outer, original=Member._on_healed):
    """Takes whatever a source gives for the state that it asked for."""
    original(self, replace(outer, round=self._wanted.round, generation=self._wanted.generation))


def counts_on(self, outer):
    """Counts the examples of all stages together."""
    self.outer = outer


def asks_once(self):
    """Believes that the message that it has asked for is still on its way, whatever has become of its round."""


def outcome_of(number: int) -> Outcome:
    """Return the outcome of a schedule; print what happens in one that breaks an invariant."""
    try:
        return run(number)
    except BrokenError as error:
        trace: list[str] = []
        with suppress(BrokenError):
            run(number, trace=trace)
        print("\n".join(trace))
        raise BrokenError(f"schedule {number}: {error}") from None


@pytest.mark.parametrize("schedules", [SCHEDULES, pytest.param(200 * SCHEDULES, marks=pytest.mark.soak)])
def test_random_schedules_break_no_invariant(schedules):
    outcomes = [outcome_of(number) for number in range(schedules)]
    assert sum(outcome.rounds for outcome in outcomes) > 3 * schedules
    assert max(outcome.longest_wait for outcome in outcomes) < 0.75  # of what the timing allows
    assert sum(not outcome.forked for outcome in outcomes) > schedules / 2


@pytest.mark.parametrize(
    ("islands", "timing"),
    [(8, replace(WAN, join_seconds=0.5)), (4, replace(WAN, join_seconds=0.2)), (2, None), (5, None), (16, None)],
)
def test_a_fleet_begins_within_the_documented_time_whatever_its_seconds_are(islands, timing):
    for number in range(12):
        seconds, limit = begin(number, islands, timing, delay=0.1)
        assert seconds <= limit, number


@pytest.mark.parametrize(
    ("name", "planted", "first"),
    [
        ("_on_reduced", commits_alone, 0),
        ("_form", divides_by_old_weights, 0),
        ("_on_healed", heals_from_stale_source, 0),
        ("_adopt", counts_on, 0),
        ("_renew_if_old", asks_once, 551),  # the first one that finds it
        ("may_end", property(lambda self: self.is_complete), 31),  # it ends with its last round, whoever is behind
        pytest.param("_renew_if_old", asks_once, 0, marks=pytest.mark.soak),
    ],
)
def test_a_planted_mistake_is_found(monkeypatch, name, planted, first):
    monkeypatch.setattr(Member, name, planted)
    assert is_found(range(first, first + 5 * SCHEDULES))


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(5072, id="three islands reach only the coordinator"),
        pytest.param(120572, id="a request that has a view is repeated after a silence"),
        pytest.param(124983, id="a message is on its way when another state of its round is installed"),
    ],
)
def test_a_schedule_that_broke_an_invariant_breaks_none(number):
    outcome_of(number)


def test_a_schedule_depends_on_its_number_alone():
    one, other = [], []
    run(17, trace=one)
    run(17, trace=other)
    assert one == other != []
