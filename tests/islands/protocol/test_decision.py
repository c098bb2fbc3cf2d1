"""What views mean, rule by rule, and which messages contribute nothing."""

from dataclasses import replace
from functools import partial

import pytest

from gregale.distributed.agreement import to_text
from gregale.islands.protocol.decision import (
    SPLIT_AFTER,
    Adopt,
    CommitAccepted,
    FormGroup,
    NewGeneration,
    StartFleet,
    Wait,
    decide,
)
from gregale.islands.protocol.messages import NO_GENERATION, AcceptedResult, Generation, Rules, View
from gregale.islands.protocol.outliers import NOT_FINITE, Size, left_out, median

ABC = ("a/s", "b/s", "c/s")
HELD = AcceptedResult("k6", 1, "d6", ABC, ABC)


def meaning(*headers, id=7, **rules):
    return decide(View(id, headers), Rules(**rules))


def plan_of(kind, *headers, **options):
    plan = meaning(*headers, **options).plan
    assert isinstance(plan, kind)
    return plan


formed, waits, turned = partial(plan_of, FormGroup), partial(plan_of, Wait), partial(plan_of, NewGeneration)


def fresh(header, name, **changes):
    return header(name, **{"round": -1, "generation": NO_GENERATION, "digest": "seed", "voter": False} | changes)


def test_the_fleet_begins_once_the_minimum_is_there(header):
    a, b = fresh(header, "a"), fresh(header, "b")
    waits(a, minimum=2)
    plan = meaning(a, b, minimum=2).plan
    assert isinstance(plan, StartFleet)
    assert (plan.generation.number, plan.voters) == (1, 2)
    later = meaning(fresh(header, "a", asked=2), b, minimum=2).plan
    assert isinstance(later, StartFleet)
    assert later.generation.name != plan.generation.name
    waits(fresh(header, "a", healing=True), b)  # it may get the state of another fleet


def test_present_members_form_a_group_with_the_weights_of_the_view(header):
    decision = meaning(header("c"), header("a", weight=3.0), header("b", ready=False, weight=7.0))
    plan = decision.plan
    assert isinstance(plan, FormGroup)
    assert [peer.name for peer in plan.members] == ["a", "b", "c"]
    assert plan.weights == (3.0, 0.0, 10.0)
    assert (plan.ballot, plan.voters, plan.electors, plan.parts) == (1, 3, ABC, ())
    assert formed(header("c", link=48), header("a"), header("b", link=36)).parts == (0, 0, 256)
    other = formed(header("c"), header("a", weight=3.0), header("b", ready=False, weight=7.0, asked=2))
    assert other.key != plan.key


def test_no_reduce_without_messages_or_with_too_few_members(header):
    idle = waits(*(header(name, ready=False) for name in "abc"))
    assert idle.idle
    few = waits(*(header(name) for name in "abc"), minimum=4)
    assert not few.idle
    assert "3 of at least 4" in few.reason


def test_who_has_another_seed_is_behind_or_in_a_minority_heals_from_all_current_members(header):
    decision = meaning(fresh(header, "a"), fresh(header, "b"), fresh(header, "c", digest="other"))
    assert (decision.differ, decision.current) == ({"c/s"}, {"a/s", "b/s"})
    decision = meaning(header("a"), header("b"), header("c", round=4, digest="d4"))
    assert decision.current == {"a/s", "b/s"}
    assert [peer.name for peer in decision.sources] == ["a", "b"]
    decision = meaning(header("a"), header("b", digest="a wrong one"), header("c"))
    assert decision.differ == {"b/s"}
    assert decision.top
    assert decision.top.digest == "d5"
    ahead, behind = header("c", round=6, digest="d6"), header("a", generation=Generation(2, "other"))
    assert meaning(ahead, behind).current == {"c/s"}, "the generation with more rounds wins"
    assert meaning(header("c"), behind).current == {"a/s"}


@pytest.mark.parametrize("holders", ["abc", "ab"])
def test_a_result_held_by_all_present_is_committed_for_an_absent_member_may_have_committed_it(header, holders):
    assert meaning(*(header(name, held=HELD, ballot=1) for name in holders)).plan == CommitAccepted("k6", "d6")


@pytest.mark.parametrize("holders", ["a", "ab"])
def test_a_result_that_a_present_voter_lacks_is_reduced_again(header, holders):
    headers = [header(n, ballot=1, held=HELD if n in holders else None, failures=int(n not in holders)) for n in "abc"]
    plan = formed(*headers)
    assert plan.ballot == 2


def test_a_result_that_an_absent_member_may_have_committed_is_never_dropped(header):
    plan = turned(header("a", held=HELD, ballot=1), header("b", ballot=1, failures=1))
    assert plan.commit == CommitAccepted("k6", "d6")
    assert plan.identities == {"a/s"}


def test_half_of_the_voters_are_not_more_than_half(header):
    """Two of four hold a result that an absent member may have committed."""
    held = AcceptedResult("k6", 1, "d6", (*ABC, "d/s"), (*ABC, "d/s"))
    headers = [header(n, ballot=1, voters=4, held=held if n in "ab" else None, failures=int(n == "c")) for n in "abc"]
    turned(*headers)
    headers[2] = header("c", ballot=1, voters=4, held=held)
    assert meaning(*headers).plan == CommitAccepted("k6", "d6")


def test_a_member_that_is_no_voter_may_have_committed_too(header):
    held = AcceptedResult("k6", 1, "d6", (*ABC, "new/s"), ABC)
    headers = [header("a", held=held, ballot=1), header("b", held=held, ballot=1), header("c", ballot=1, failures=1)]
    assert meaning(*headers).plan == CommitAccepted("k6", "d6")
    new = header("new", held=held, ballot=1, voter=False)
    formed(*headers, new)


def test_without_a_wait_only_voters_begin_a_generation(header):
    new = header("new", voter=False)
    plan = turned(header("a"), new)
    assert plan.identities == {"a/s"}
    plan = turned(header("a", seen=0, wait_expired=True), new)
    assert plan.identities == {"a/s", "new/s"}


def test_the_newest_of_two_results_counts(header):
    newer = AcceptedResult("k6b", 2, "d6b", ABC, ABC)
    headers = [header("a", held=HELD, ballot=2), *(header(name, held=newer, ballot=2) for name in "bc")]
    plan = meaning(*headers[1:]).plan
    assert plan == CommitAccepted("k6b", "d6b")
    formed(*headers)  # all that may have committed it are here and did not


def test_with_several_coordinators_the_result_that_was_accepted_last_is_adopted(header):
    """The two present voters of three hold different ones: the absent one may have committed the last."""
    last = replace(HELD, key="k6b", stamp=9)
    held = {"a": replace(HELD, stamp=3), "b": last}
    headers = [header(name, held=each, prepared=True, electors=ABC) for name, each in held.items()]
    for each in (headers, headers[::-1]):
        assert decide(View(7, tuple(each), 10), Rules(majority=True)).plan == Adopt(replace(last, stamp=10))


@pytest.mark.parametrize("changes", [{"seen": 0}, {"seen": 6}, {"seen": 9}, {"failures": 2}, {"voter": False}], ids=str)
def test_half_of_the_voters_wait_first_without_a_witness(header, changes):
    waiting = waits(header("a", **changes), id=8)
    assert waiting.missing
    waited = turned(header("a", **changes, wait_expired=True), id=8)
    assert waited.waited


def test_half_of_the_voters_begin_a_generation_with_a_witness_and_more_than_half_wait_too_without_one(header):
    plan = turned(header("a"), id=8)
    assert (plan.generation.number, plan.identities, plan.commit, plan.waited) == (2, {"a/s"}, None, False)
    waits(header("a", seen=0), header("b", seen=0), id=1)
    formed(*(header(name, seen=0) for name in "abc"), id=1)


def test_another_configuration_or_version_is_refused(header):
    ours, other = to_text({"steps": "9", "seed": "0"}), to_text({"steps": "9", "seed": "5"})
    fleet = [header("a", agreement=ours), header("b", agreement=ours)]
    headers = [*fleet, header("c", agreement=other, round=99), header("d", version="2", agreement=ours)]
    refused = meaning(*headers).refused
    assert refused.keys() == {"c/s", "d/s"}
    assert refused["c/s"] == "seed is 0 in the fleet, but 5 in this island"
    assert "runs Gregale 1 and this island 2" in refused["d/s"]
    assert meaning(*headers).current == {"a/s", "b/s"}


def test_members_that_do_not_reach_each_other_are_left_out_after_two_failures_down_to_the_minimum(header):
    def group(n: int):
        return header("a", failures=n, unreachable=("c",)), header("b"), header("c", failures=n, unreachable=("a", "b"))

    assert len(formed(*group(1)).members) == 3
    assert [peer.name for peer in formed(*group(2)).members] == ["a", "b"]
    assert len(formed(*group(2), minimum=3).members) == 3


def test_a_leaver_is_no_voter_of_the_round_that_it_leaves_with(header):
    plan = formed(header("a"), header("b"), header("c", leaving=True, used=33))
    assert plan.voters == 2
    assert plan.leaving == {"c/s"}
    assert ("c", "s", 33, True, 1) in plan.reports


def test_in_lockstep_a_round_waits_for_all_live_members_and_otherwise_for_one_that_would_be_behind_again(header):
    headers = (header("a"), header("b", ready=False), header("c"))
    formed(*headers, header("d", round=3, digest="d3", voter=False, healing=True))
    waits(*headers, fresh(header, "d", healing=True, hold_rounds=True))
    waits(*headers, lockstep=True)


def test_a_view_that_lacks_voters_is_requested_once_more(header):
    """They may live and be late: the coordinator counts its patience from the oldest ask, also from a joiner's."""
    joiner = header("j", round=4, voter=False)
    plan = waits(header("a", retried=False), header("b"), joiner)
    assert plan.lacking
    formed(header("a"), header("b"), joiner)
    formed(header("a", retried=False), header("b"), header("c"))


@pytest.mark.parametrize(("here", "goes_on"), [("ade", False), ("abd", True), ("abc", True)])
def test_who_does_not_know_the_voters_goes_on_only_with_most_of_the_ledgers_islands(header, here, goes_on):
    """The others may live, and be enough to go on by themselves with new islands."""
    given = {"from_checkpoint": True, "voter": False, "voters": 3, "wait_expired": True, "known": ("a", "b", "c")}
    plan = meaning(*(header(name, **given) for name in here), minimum=3, start=3, majority=True).plan
    assert isinstance(plan, NewGeneration) == goes_on


@pytest.mark.parametrize(("known", "goes_on"), [(("a", "b", "c", "n"), False), (("a", "b", "n"), True)])
def test_survivors_go_on_only_if_too_few_islands_are_elsewhere_to_begin_anew(header, known, goes_on):
    """The processes of the other voters are dead, but two that started again are enough for a fleet."""
    given = {"electors": ABC, "known": known, "dead": ("b/s", "c/s"), "wait_expired": True}
    plan = meaning(header("a", **given), header("n", voter=False, **given), minimum=2, start=2, majority=True).plan
    assert isinstance(plan, NewGeneration) == goes_on


def test_a_fleet_restored_from_checkpoints_waits_for_as_many_members_as_a_new_one(header):
    """The first to come may have an older state than those that are still starting."""
    alone = header("a", from_checkpoint=True, voter=False, wait_expired=True)
    waits(alone, start=2)
    turned(alone, header("b", from_checkpoint=True, voter=False, round=7, wait_expired=True), start=2)
    turned(header("a", voter=False, wait_expired=True), start=2)  # a survivor goes on


def test_outlier_and_nonfinite_messages_contribute_nothing(header):
    usual = Size(1.0, 10.0)
    plan = formed(*(header(name, norm=norm, usual=usual) for name, norm in (("a", 1.0), ("b", 90.0), ("c", None))))
    assert plan.weights == (10.0, 0.0, 0.0)
    assert plan.left_out.keys() == {"b", "c"}
    assert plan.size == Size(1.0, 10.0)
    assert plan.sizes_after((usual,)) == (usual, usual)


def test_after_more_failures_one_of_two_separated_halves_continues(header):
    def pair(failures: int):
        return (header(a, unreachable=(b,), failures=failures, voters=2) for a, b in ("ab", "ba"))

    formed(*pair(SPLIT_AFTER - 1))
    parted = turned(*pair(SPLIT_AFTER))
    assert (len(parted.members), parted.commit) == (1, None)
    formed(*pair(SPLIT_AFTER), minimum=2)


def test_members_are_excluded_in_turn_when_no_failure_names_one(header):
    groups = set()
    for ballot in range(3):
        plan = formed(*(header(name, failures=SPLIT_AFTER, ballot=ballot) for name in "abc"))
        groups.add("".join(peer.name for peer in plan.members))
    assert groups == {"ab", "ac", "bc"}


def test_islands_without_data_get_new_leases(header):
    changes = {"weight": 0.0, "starved": True}
    formed(header("a"), *(header(name, **changes) for name in "bc"))
    waits(header("a", weight=0.0), *(header(name, **changes) for name in "bc"))  # a will bring something
    plan = turned(*(header(name, **changes) for name in "abc"))
    assert [report.name for report in plan.reports] == ["a", "b", "c"]


def out(*norms: float | None, usual: float | None = None, weights: tuple[float, ...] = ()) -> set[int]:
    """The indices of the messages that are left out, at ten times what is expected."""
    weights = weights or (1.0,) * len(norms)
    sizes = {
        str(index): None if norm is None else Size(norm, weight)
        for index, (norm, weight) in enumerate(zip(norms, weights, strict=True))
    }
    return {int(name) for name in left_out(sizes, Size(usual, 1.0) if usual else None, 10.0)}


def test_messages_far_above_the_median_are_left_out():
    assert out(1.0, 1.5, 30.0) == {2}
    assert out(1.0, 1.5, 9.0) == set()
    assert out(1.0, 1.5, 100.0, 100.0) == {2, 3}, "half of the messages cannot lift it"


def test_of_two_messages_the_one_unlike_the_previous_rounds_is_left_out():
    assert out(1.0, 100.0, usual=1.0) == {1}
    assert out(0.01, 1.0, usual=1.0) == set()  # the first one has just come, and has moved less
    assert out(1.0, 100.0) == {1}  # in the first round


def test_a_single_message_is_left_out_only_if_it_is_not_finite():
    assert out(1000.0, usual=1.0) == set()
    assert out(None) == {0}
    assert left_out({"a": None, "b": Size(1.0, 1.0)}, None, 10.0) == {"a": NOT_FINITE}


def test_a_message_of_more_tokens_may_have_a_larger_norm():
    assert out(1.0, 1.0, 30.0, weights=(1.0, 1.0, 30.0)) == set()
    assert out(1.0, 30.0, usual=1.0, weights=(1.0, 30.0)) == set()
    assert out(1.0, 1.0, 301.0, weights=(1.0, 1.0, 30.0)) == {2}


def test_a_norm_of_zero_is_not_compared_with():
    assert out(0.0, 0.0, 1.0) == set()
    assert median([Size(0.0, 1.0), Size(2.0, 1.0), Size(3.0, 1.0)]) == Size(2.0, 1.0)
    assert median([Size(0.0, 1.0)]) is None
