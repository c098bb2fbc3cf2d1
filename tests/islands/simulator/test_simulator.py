"""Random schedules of faults break no invariant, and planted mistakes do."""

from contextlib import suppress
from dataclasses import replace

import pytest

from gregale.islands.protocol.member import Member
from gregale.islands.protocol.messages import WAN
from tests.islands.simulator.invariants import BrokenError
from tests.islands.simulator.schedules import Outcome, begin, is_found, run

SCHEDULES = 100


class CommitsAlone(Member):
    """Commits what it holds without asking whether the others do."""

    def _on_reduced(self, event):
        super()._on_reduced(event)
        if self._held:
            self._commit(None)


class DividesByOldWeights(Member):
    """Uses the weights of the quorum before, as long as their number fits."""

    old = ()

    def _form(self, view, plan):
        now, self.old = self.old, plan.weights
        super()._form(view, replace(plan, weights=now) if len(now) == len(plan.weights) else plan)


class HealsFromStaleSource(Member):
    """Takes whatever a source gives for the state that it asked for."""

    def _on_healed(self, outer):
        wanted = self._wanted
        super()._on_healed(replace(outer, round=wanted.round, generation=wanted.generation))


class AsksOnce(Member):
    """Believes that the message that it has asked for is still on its way, whatever has become of its round."""

    def _renew_if_old(self):
        pass


class CountsOn(Member):
    """Counts the examples of all stages together."""

    def _adopt(self, outer):
        self.outer = outer


class EndsAtOnce(Member):
    """Ends with its last round, whoever is behind."""

    @property
    def may_end(self):
        return self.is_complete


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
    ("planted", "first"),
    [
        (CommitsAlone, 0),
        (DividesByOldWeights, 0),
        (HealsFromStaleSource, 0),
        (CountsOn, 0),
        (AsksOnce, 551),  # the first one that finds it
        (EndsAtOnce, 31),
        pytest.param(AsksOnce, 0, marks=pytest.mark.soak),
    ],
)
def test_a_planted_mistake_is_found(planted, first):
    assert is_found(range(first, first + 5 * SCHEDULES), planted)


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
