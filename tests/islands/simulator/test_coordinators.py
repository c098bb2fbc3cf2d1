"""Several coordinators: splits, one-way cuts and deaths make no second history, and planted mistakes do."""

from dataclasses import replace

import pytest

from gregale.islands.protocol import decision
from gregale.islands.protocol.choice import Choice
from gregale.islands.protocol.member import Member
from gregale.islands.protocol.membership import Membership
from gregale.islands.protocol.messages import LAN, WAN
from tests.islands.simulator.invariants import BrokenError
from tests.islands.simulator.schedules import end_apart, fail_over, is_found, run

SCHEDULES = 30


@pytest.mark.parametrize("schedules", [SCHEDULES, pytest.param(100 * SCHEDULES, marks=pytest.mark.soak)])
@pytest.mark.parametrize("coordinators", [2, 3])
def test_random_schedules_make_one_history(coordinators, schedules):
    outcomes = [run(number, coordinators=coordinators) for number in range(schedules)]
    assert sum(outcome.rounds for outcome in outcomes) > 3 * schedules
    assert sum(not outcome.forked for outcome in outcomes) > schedules / 2


@pytest.mark.parametrize(
    ("number", "coordinators"),
    [
        pytest.param(31171, 2, id="half goes on, as the others are dead"),
        pytest.param(31305, 3, id="two healed from the only voter, whom they do not know"),
        pytest.param(32859, 3, id="the same with an island that the ledger does not know"),
        pytest.param(51250, 3, id="islands come when another has completed the run and ended"),
        pytest.param(51341, 2, id="the same with one that has died before"),
    ],
)
def test_a_schedule_that_broke_an_invariant_breaks_none(number, coordinators):
    run(number, coordinators=coordinators)


@pytest.mark.parametrize(("timing", "limit", "again"), [(LAN, 6.5, 3.0), (WAN, 17.5, 13.0)])
@pytest.mark.parametrize("with_island", [False, True])
def test_rounds_go_on_without_the_first_coordinator_and_it_is_found_again(timing, limit, again, with_island):
    for number in range(3):
        seconds, found = fail_over(number, timing, with_island)
        assert seconds <= limit
        assert found <= again


def test_two_sides_that_complete_a_run_end_with_one_state():
    for number in range(5):
        world = end_apart(number)
        assert world.complete == {"i0", "i1", "i2"}
        assert len(world.final) == 1


def records_again(self, run, last):
    self.complete[run] = last
    return True


def forgets_records(self, first_id, complete, original=Membership.__init__):
    original(self, first_id)


def trusts_one(self):
    return next((heard.record for heard in self._all if heard.record), None)


@pytest.mark.parametrize(
    ("owner", "name", "planted"),
    [
        pytest.param(Member, "verdict", property(lambda self: True if self.saved else None), id="ends unrecorded"),
        pytest.param(Choice, "recorded", property(trusts_one), id="takes what one coordinator has recorded"),
        pytest.param(Membership, "record", records_again, id="records each last state in place of the one before"),
        pytest.param(Membership, "__init__", forgets_records, id="has no disk"),
    ],
)
def test_a_mistake_that_lets_two_sides_end_apart_is_found(monkeypatch, owner, name, planted):
    monkeypatch.setattr(owner, name, planted)
    with pytest.raises(BrokenError, match="the run ends with other parameters"):
        [end_apart(number) for number in range(5)]


def promises_nothing(self, needed, is_fresh, original=Choice.request):
    """Asks each coordinator under that one's own term."""
    self._promised = 0
    return original(self, needed, is_fresh)


def has_no_terms(self, ask, now, original=Membership.ask):
    """Takes requests of every term into its views."""
    original(self, replace(ask, term=0), now)


def by_witness(view, headers, current, rules):
    """As with one coordinator."""
    return decision._by_witness(view, current)


def never_adopts(view, headers, current, rules, original=decision._by_majority):
    plan = original(view, headers, current, rules)
    return None if isinstance(plan, decision.Adopt) else plan


def continues_with_half(view, headers, current, rules, original=decision._survivors):
    """Takes all who are not there for dead."""
    dead = tuple(each for header in current for each in header.electors)
    return original(view, headers, [replace(each, dead=dead, known=()) for each in current], rules)


@pytest.mark.parametrize(
    ("owner", "name", "planted"),
    [
        (decision, "_by_majority", by_witness),
        (decision, "_by_majority", never_adopts),
        (decision, "_survivors", continues_with_half),
        (Membership, "ask", has_no_terms),
        (Choice, "request", promises_nothing),
    ],
)
def test_a_planted_mistake_is_found(monkeypatch, owner, name, planted):
    monkeypatch.setattr(owner, name, planted)
    assert is_found(range(10 * SCHEDULES), coordinators=2)
