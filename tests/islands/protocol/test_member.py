"""One member, event by event."""

import random
from dataclasses import replace

import pytest

from gregale.islands.protocol import messages as m
from gregale.islands.protocol.decision import decide
from gregale.islands.protocol.member import HEAL_MARGIN, Identity, Member
from gregale.islands.protocol.messages import LAN, NO_ROUND, Generation, Header, Rules, View, seed


def member(name="a", **timing):
    identity = Identity(name, "s", "x", "1", (f"{name}:1",))
    found = Member(identity, seed("seed"), replace(LAN, **timing), Rules())
    found.handover.step_seconds = 2.0
    return found


def kinds(actions):
    return [type(action).__name__ for action in actions]


def only(actions, kind):
    (found,) = [action for action in actions if isinstance(action, kind)]
    return found


def view(*members, id=1):
    return m.ViewReceived(View(id, tuple(each.header for each in members)))


def all_see(*members, id=1):
    """Each member receives the view with the present headers of all; returns the actions of each."""
    seen = view(*members, id=id)
    return [each.handle(seen) for each in members]


def ready(*members, weight=1.0, used=1):
    """Each member has made its steps of a round, and has its message."""
    for each in members:
        each.handle(m.RoundDue())
        each.handle(m.MessageReady(each.outer.round, weight, used))


def reduced(*members, digest="d1"):
    """The members have the result of their reduce; returns the actions of each that follow."""
    for each in members:
        each.handle(m.Reduced(each._reducing[0].key, digest))
    return all_see(*members)


def one_round(*members):
    """The members reduce and commit a round; returns the actions of each that began the reduce."""
    ready(*members)
    begin = all_see(*members)
    assert all("Commit" in kinds(actions) for actions in reduced(*members))
    return begin


def begun(*members):
    for each in members:
        each.handle(m.Tick(0.0))
    assert all("Publish" in kinds(actions) for actions in all_see(*members))
    return members


def test_a_round_of_two():
    a, b = begun(member("a"), member("b"))
    assert a.handle(m.RoundDue(-1)) == [], "a late announcement"
    assert kinds(a.handle(m.RoundDue())) == ["AnnounceRound", "RequestMessage"]
    assert kinds(b.handle(m.RoundDue(0))) == ["AnnounceRound", "RequestMessage"], "it passes the announcement on"
    assert kinds(b.handle(m.MessageReady(0, 0.0, 0))) == ["RequestView"]
    assert kinds(a.handle(m.MessageReady(0, 8.0, 2))) == ["RequestView"]
    (reduce,) = {only(actions, m.Reduce) for actions in all_see(a, b)}
    assert reduce.weights == (8.0, 0.0)
    for each in (a, b):
        assert kinds(each.handle(m.Reduced(reduce.key, "d1"))) == ["RequestView"]
    commit, other = (only(actions, m.Commit) for actions in all_see(a, b))
    assert (commit.key, commit.weight, commit.outer.round, commit.outer.digest) == (reduce.key, 8.0, 1, "d1")
    assert other.outer == commit.outer
    assert commit.outer.ledger.lease("a", "s")


def test_only_a_group_that_made_the_state_and_has_not_failed_is_used_again():
    """The streams of a member that was cut off look open, but the others have ended theirs."""
    a, b = members = begun(member("a"), member("b"))
    one_round(a, b)
    assert not any("DropGroup" in kinds(actions) for actions in one_round(a, b))
    ready(a, b)
    all_see(a, b)
    for each in members:
        each.handle(m.ReduceFailed(each._reducing[0].key))
    assert all("DropGroup" in kinds(actions) for actions in all_see(a, b)), "a second try"
    reduced(*members)
    a.outer = replace(a.outer, last="made without this member")
    b.outer = replace(b.outer, last="made without this member")
    assert all("DropGroup" in kinds(actions) for actions in one_round(a, b)), "a healed member"


def test_the_grace_is_one_and_a_half_steps_of_the_fastest_island():
    a, b = member("a"), member("b")
    a.handover.step_seconds = 2.9
    begun(a, b)
    a.handle(m.RoundDue())
    assert a.next_tick() <= 3.0
    assert "RequestView" not in kinds(a.handle(m.Tick(2.9)))
    assert "RequestView" in kinds(a.handle(m.Tick(3.0)))
    assert not a.header.ready


@pytest.mark.parametrize(
    ("copy_seconds", "others", "early", "grace"),
    [
        (1.1, [1.0, 1.0], False, 3.5),  # a copy of 0.1 s, and a step that is queued
        (1.1, [0.0, 0.0], False, 3.7),  # the others are slow: they hand messages over early, and nobody waits for them
        (3.6, [1.0, 1.0], True, 3.5),
        (3.6, [1e-4, 1e-4], True, 1.502),
        (3.6, [4.0, 4.0], False, 8.7),
    ],
)
def test_a_message_goes_early_if_its_copy_takes_longer_than_the_others_wait(copy_seconds, others, early, grace):
    members = a, *rest = [member("a"), member("b"), member("c")]
    for each, seconds in zip(members, [copy_seconds, *others], strict=True):
        each.handover.step_seconds, each.handover.copy_seconds = 1.0, seconds
    for each, seconds in zip(rest, others, strict=True):
        each.handover.early = not seconds
    for due in (0.0, 9.0):  # so that a knows when the next round is
        a.handover.fall_due(due)
    a.handover.next_round(used=True)
    begun(*members)
    assert (a.handover.early, a.handover.grace_seconds) == (early, pytest.approx(grace))


def test_an_island_that_contributes_nothing_is_reported_with_the_reason():
    a, b = begun(member("a"), member("b"))
    a.handover.step_seconds = 4.0
    said = {"a": [], "b": []}
    for number, weight in enumerate([1.0, 0.0, 0.0, 0.0, 0.0, 1.0]):
        for each, tokens in ((a, weight), (b, 1.0)):
            each.handle(m.Tick(5.0 * number))
            each.handle(m.RoundDue())
            each.handle(m.MessageReady(number, tokens, 1))
        all_see(a, b)
        for each, actions in zip("ab", reduced(a, b, digest=f"d{number}"), strict=True):
            said[each] += [action.text for action in actions if isinstance(action, (m.LeftOut, m.LogLine))]
    why = "has contributed to no round since round 1, 15 s ago: it had no message when rounds were due (a step of it"
    assert [line.startswith(f"this island {why}") for line in said["a"]] == [True, False]
    assert said["a"][1] == "this island contributes again, to round 6"
    assert [line.startswith(f"island a {why}") for line in said["b"]] == [True]


def test_a_reduce_that_times_out_has_failed():
    (a,) = begun(member("a", reduce_seconds=4.0))
    ready(a)
    reduce = only(a.handle(view(a)), m.Reduce)
    assert a.next_tick() == 4.0
    assert kinds(a.handle(m.Tick(4.0)))[0] == "DropGroup"
    assert a.header.failures == 1
    assert a.handle(m.Reduced(reduce.key, "late")) == []
    assert a.header.held is None


def test_a_view_with_a_request_seen_before_is_ignored():
    a, b = begun(member("a"), member("b"))
    old = b.header
    ready(a)
    assert kinds(a.handle(m.ViewReceived(View(1, (a.header, old))))) == ["RequestView"]


def test_a_fetched_state_older_than_the_requested_one_is_rejected():
    a, b = begun(member("a"), member("b"))
    ahead = replace(a.outer, round=9, digest="d9")
    assert kinds(a.handle(m.RoundDue(9))) == ["RequestView"], "it is announced from ahead"
    header = replace(b.header, round=9, digest=ahead.fingerprint(), asked=5)
    heal = only(a.handle(m.ViewReceived(View(1, (a.header, header)))), m.Heal)
    assert heal.round == 9
    actions = a.handle(m.Healed(replace(ahead, round=8)))
    assert "Install" not in kinds(actions)
    assert only(actions, m.LogLine).loud
    a.handle(m.ViewReceived(View(1, (a.header, replace(header, asked=6)))))
    actions = a.handle(m.Healed(ahead))
    assert only(actions, m.Install).outer == ahead
    assert only(actions, m.RequestView).header.round == 9


def test_a_leaver_returns_its_unused_examples():
    a, b = begun(member("a"), member("b"))
    for number in range(2):
        if final := number == 1:
            assert "RequestMessage" in kinds(b.handle(m.Leave()))
        a.handle(m.RoundDue())
        b.handle(m.RoundDue(number))
        a.handle(m.MessageReady(number, 1.0, 5))
        b.handle(m.MessageReady(number, 1.0, 7 * number, final=final))
        for each in (a, b):
            each.handle(m.Tick(float(number + 1)))
        only(all_see(a, b)[0], m.Reduce)
        committed, last = reduced(a, b, digest=f"d{number}")
        ledger = only(committed, m.Commit).outer.ledger
    assert kinds(last)[-1] == "LeaveDone"
    assert "Commit" in kinds(last)
    assert b.done
    assert [lease.name for lease in ledger.leases] == ["a"]
    assert ledger.free == ((4096 + 7, 8192),)


def test_a_member_with_another_configuration_ends_with_one_line():
    a, b, other = (*begun(member("a"), member("b")), member("c"))
    other.identity = replace(other.identity, agreement="y")
    other.handle(m.Tick(0.0))
    a.handle(m.RoundDue(1))
    b.handle(m.RoundDue(1))
    refused = only(other.handle(view(a, b, other)), m.Rejected)
    assert "x in the fleet, but y in this island; this island ends" in refused.text
    assert other.done


def test_a_member_with_a_different_state_heals_with_a_warning():
    a, b, c = begun(member("a"), member("b"), member("c"))
    c.outer = replace(c.outer, digest="broken memory")
    ready(a, b, c)
    actions = c.handle(view(a, b, c))
    assert only(actions, m.LogLine).loud
    assert only(actions, m.Heal).digest == a.outer.fingerprint()


def test_a_message_on_its_way_is_obsolete_once_another_state_of_the_same_round_is_installed():
    """The round is due in the other state, too, before the message is on the host."""
    a, b = begun(member("a"), member("b"))
    a.handle(m.RoundDue())
    other = replace(b.outer, generation=Generation(9, "other"), digest="d9")
    header = replace(b.header, generation=other.generation, digest=other.fingerprint(), asked=5)
    a.handle(m.RoundDue(9))  # it asks for a view
    count = a.handover.depart(0)
    only(a.handle(m.ViewReceived(View(1, (a.header, header)))), m.Heal)
    only(a.handle(m.Healed(other)), m.Install)
    a.handle(m.RoundDue())
    assert a.handover.wanted == 0
    assert a.handover.count != count


def test_an_unanswered_request_is_repeated_and_its_member_is_no_witness():
    (a,) = begun(member("a"))
    a.handle(m.RoundDue())
    assert only(a.handle(m.MessageReady(0, 1.0, 1)), m.RequestView).header.seen == 1
    assert a.handle(m.ViewFailed("no answer")) == []
    assert 0 < a.next_tick() <= LAN.retry_seconds
    asked = [action for action in a.handle(m.Tick(LAN.retry_seconds)) if isinstance(action, m.RequestView)]
    assert (asked[0].header.asked, asked[0].header.seen) == (3, 0)


def test_rounds_wait_for_slow_healing_at_times_and_about_as_long_as_it_took_before():
    a, _ = begun(member("a"), member("b"))
    late, awaited = member("c"), []
    for number in range(1, 9):
        a.outer = replace(a.outer, round=number)
        late.handle(m.Tick(100.0 * number))
        heal = late.handle(m.ViewReceived(View(number, (replace(a.header, asked=100 + number), late.header))))
        assert only(heal, m.Heal).round == number
        late.handle(m.Tick(100.0 * number + 25.0))
        awaited.append(late.header.hold_rounds)
        late.handle(m.Tick(100.0 * number + 30.0))
        only(late.handle(m.Healed(a.outer)), m.Install)
    assert awaited == [False, True, False, False, False, False, False, False]
    assert late._hold_time() > LAN.turnover_seconds + HEAL_MARGIN * 30.0  # 30 s each time: after 53 s in all, no more


def test_rounds_wait_for_failing_heals_no_longer_than_for_one():
    """Each failed try used to begin the wait anew, so that one island with a bad data path halted all."""
    a, _ = begun(member("a"), member("b"))
    late, now, awaited = member("c"), 0.0, 0.0
    late.handle(m.Tick(now))
    for number in (1, 2):  # healed, and behind again
        a.outer = replace(a.outer, round=number)
        late.handle(m.ViewReceived(View(number, (replace(a.header, asked=100 + number), late.header))))
        late.handle(m.Healed(a.outer))
    a.outer = replace(a.outer, round=3)
    for number in range(3, 60):
        now += LAN.retry_seconds
        late.handle(m.Tick(now))
        late.handle(m.ViewReceived(View(number, (replace(a.header, asked=100 + number), late.header))))
        for _ in range(30):
            awaited += 0.1 * late.header.hold_rounds
            now += 0.1
            late.handle(m.Tick(now))
        late.handle(m.HealFailed("no way"))
    assert LAN.turnover_seconds - 1 < awaited < LAN.turnover_seconds + 1


def test_a_member_whose_peers_are_all_dead_continues_at_once():
    """After views that it has not seen it cannot know whether the others have gone on; but the dead have not."""
    a, *_ = begun(*(member(name, grace_seconds=0.0) for name in "abc"))
    retry = a.timing.retry_seconds

    def seen(at: float) -> list[m.Action]:
        a.handle(m.Tick(at))
        return a.handle(view(a, id=5))

    ready(a)
    assert seen(0.0) == []  # they may only be late
    find = only(seen(retry), m.ProbePeers)
    assert [peer.identity for peer in find.peers] == ["b/s", "c/s"]
    a.handle(m.PeersDead(frozenset({"b/s"})))
    assert "ProbePeers" in kinds(seen(2 * retry))  # c may live
    a.handle(m.PeersDead(frozenset({"c/s"})))
    turned = seen(3 * retry)
    assert only(turned, m.Publish).outer.generation.number == 2
    assert "RequestView" in kinds(turned)  # it makes its round alone


def test_a_member_that_saw_every_view_while_it_waited_is_a_witness():
    """Each death changes the view's id: waiting views in between are no gap."""
    a, *_ = begun(*(member(name, grace_seconds=0.0) for name in "abc"))
    ready(a)
    assert a.handle(view(a, id=2)) == []  # the others may only be late
    a.handle(m.Tick(a.timing.retry_seconds))
    assert only(a.handle(view(a, id=3)), m.Publish).outer.generation.number == 2


def test_a_member_without_contribution_hands_over_another_message_after_its_peers_died():
    """It used to ask 5,212 times in 1,200 s for a round that nobody could make.

    It has healed, was asked for its message before its first step, and has lost its peers.
    """
    a, b = begun(member("a"), member("b"))
    for each in (a, b):
        each.outer = replace(each.outer, round=5, digest="d5")
    c, now, asked = member("c"), 0.0, 0
    c.handle(m.Tick(now))
    c.handle(m.ViewReceived(View(2, (c.header, *(replace(each.header, asked=9) for each in (a, b))))))
    c.handle(m.Healed(a.outer))
    assert "RequestMessage" in kinds(c.handle(m.RoundDue(5)))
    c.handle(m.MessageReady(5, 0.0, 0))
    while c.outer.generation.number == 1 and now < 60:
        now += LAN.retry_seconds
        c.handle(m.Tick(now))
        c.handle(m.ViewReceived(View(3, (c.header,))))
    assert c.header.weight == 0
    assert c.outer.generation.number == 2  # it was waited for the others
    while "RequestMessage" not in kinds(c.handle(m.RoundDue())) and asked < 2:
        asked += 1
        c.handle(m.Tick(now + asked))
        c.handle(m.ViewReceived(View(3, (c.header,))))
    assert not c.header.ready
    assert "RequestView" in kinds(c.handle(m.MessageReady(5, 8.0, 2)))
    assert only(c.handle(m.ViewReceived(View(3, (c.header,)))), m.Reduce).weights == (8.0,)


def test_an_old_message_is_replaced_only_when_no_reduce_can_depend_on_it():
    a, b = begun(member("a"), member("b"))
    ready(a, weight=8.0)
    assert "RequestMessage" not in kinds(a.handle(m.RoundDue()))  # a view that it waits for may begin a reduce with it
    b.handle(m.RoundDue(0))
    b.handle(m.MessageReady(0, 1.0, 2))
    reduce = only(a.handle(view(a, b)), m.Reduce)
    assert "RequestMessage" not in kinds(a.handle(m.RoundDue()))
    assert "RequestMessage" in kinds(a.handle(m.ReduceFailed(reduce.key, ("b",))))
    assert not a.header.ready


def reducing(*norms):
    """Three members in the reduce of a round, what it is called, and what each did with its message."""
    members, said = begun(*(member(name) for name in "abc")), []
    for each, norm in zip(members, norms, strict=True):
        each.handle(m.RoundDue())
        said.append(each.handle(m.MessageReady(0, 8.0, 2, norm=norm)))
    (found,) = {only(actions, m.Reduce) for actions in all_see(*members)}
    return members, found, said


def test_all_members_report_an_outlier_message_and_its_island_restarts():
    members, reduce, _ = reducing(1.0, 1.0, 50.0)
    assert reduce.weights == (8.0, 8.0, 0.0)
    actions = reduced(*members)
    (text,) = {only(done, m.LogLine).text for done in actions}
    assert text.startswith("round 1: the message of island c has the norm 50, more than 10 times the 1 expected")
    assert ["Reset" in kinds(done) for done in actions] == [False, False, True]
    assert [peer.name for peer in only(actions[2], m.Reset).peers] == ["a", "b"]
    assert only(actions[0], m.Commit).outer == only(actions[2], m.Commit).outer
    assert members[0].outer.sizes == ((1.0, 8.0),)


def test_a_nonfinite_message_has_no_weight_and_its_island_restarts_before_the_round():
    members, reduce, said = reducing(1.0, 1.0, None)
    assert {"LogLine", "Reset"} <= set(kinds(said[2]))
    assert members[2].header.weight == 0
    assert reduce.weights == (8.0, 8.0, 0.0)
    actions = reduced(*members)
    assert all("not finite" in only(done, m.LogLine).text for done in actions)
    assert not any("Reset" in kinds(done) for done in actions)  # it has done so already


def test_after_a_nonfinite_outer_step_all_members_repeat_the_round():
    members, reduce, _ = reducing(1.0, 1.0, 1.0)
    for each in members:
        actions = each.handle(m.ReduceFailed(reduce.key, overflowed=True))
        assert "Reset" in kinds(actions)
        assert each.header.weight == 0
        each.handle(m.RoundDue())
    assert all("RequestMessage" in kinds(actions) for actions in all_see(*members))


def test_islands_repeat_failed_requests_at_different_times():
    """Otherwise islands that a coordinator could not serve at once would come back at once."""
    pauses = set()
    for number in range(64):
        each = Member(replace(member("a").identity, session=f"s{number}"), seed("d"), LAN, Rules())
        each.handle(m.Tick(5.0))
        each.handle(m.ViewFailed("it does not answer"))
        pauses.add(each.next_tick() - 5.0)
    assert len(pauses) == 64
    assert LAN.retry_seconds / 2 <= min(pauses) < 0.6 * LAN.retry_seconds
    assert 0.9 * LAN.retry_seconds < max(pauses) <= LAN.retry_seconds


def test_the_stall_reason_names_the_cause():
    a, b = begun(member("a"), member("b"))
    assert a.stall_reason() == ""
    a.handle(m.RoundDue())
    a.handle(m.MessageReady(0, 8.0, 2))
    assert not a.is_reason_known(0.0, 0.0), "the coordinator has not answered since this request"
    a.handle(m.Heartbeat(held="the coordinator waits for the requests of b"))
    assert a.is_reason_known(0.0, 0.0)
    assert a.stall_reason() == "the coordinator waits for the requests of b"
    a.handle(m.ViewFailed("it does not answer"))
    a.handle(m.Tick(20.0))
    assert a.stall_reason() == "the coordinator has not answered for 20 s (it does not answer)"
    a.handle(m.ViewReceived(View(1, (a.header,))))
    assert a.stall_reason().endswith("(b)")  # a voter that is missing
    a.handle(m.Tick(21.0))
    b.handle(m.RoundDue())
    b.handle(m.MessageReady(0, 8.0, 2))
    assert "Reduce" in kinds(a.handle(view(a, b)))
    assert a.stall_reason() == "round 0 is being reduced by a, b"


def test_a_member_with_failing_reduces_pauses_for_a_time_that_doubles():
    """It heals from them and fails them again: each time the others stand still for two reduces."""
    members = begun(*(member(name) for name in "abc"))
    *others, bad = members
    ready(*members)
    for number in (1, 2):
        (reduce,) = {only(actions, m.Reduce) for actions in all_see(*members)}
        for each in members:
            each.handle(m.ReduceFailed(reduce.key, ("a", "b") if each is bad else ("c",)))
        assert bad._failures == number
    *reduces, pause = all_see(*members)
    assert [len(only(actions, m.Reduce).members) for actions in reduces] == [2, 2]
    assert kinds(pause) == ["RequestView"]
    go_on = [replace(each.header, round=1, digest="d1", voters=2) for each in others]
    now, actions = 0.0, []
    while "Heal" not in kinds(actions) and now < 100:
        now += LAN.retry_seconds
        bad.handle(m.Tick(now))
        headers = [replace(each, asked=10 + round(now / LAN.retry_seconds)) for each in go_on]
        actions = bad.handle(m.ViewReceived(View(2 + round(now / LAN.retry_seconds), (*headers, bad.header))))
    assert LAN.turnover_seconds <= now < LAN.turnover_seconds + 2 * LAN.retry_seconds
    bad._failures = 2
    bad._pause_if_excluded()
    assert bad._paused_until == now + 2 * LAN.turnover_seconds


def test_a_view_with_a_request_of_an_earlier_view_is_recognised():
    rng, islands = random.Random(0), "abcdefgh"
    numbers = dict.fromkeys(islands, 0)
    members = {name: Member(Identity(name, "s", "", "", ()), seed(""), LAN, Rules()) for name in islands}
    views = {name: set() for name in islands}
    repeats = 0
    for number in range(400):
        present = sorted(rng.sample(islands, rng.randrange(1, 9)))
        for name in present:
            numbers[name] += rng.random() < 0.9  # else an older ask comes again
        asked = {name: max(1, numbers[name] - (rng.random() < 0.1)) for name in present}
        headers = (Header(name, "s", asked[name], "", "", (name,)) for name in present)
        decision = decide(View(number, tuple(headers)), Rules())
        for name in present:
            expected = any(
                (who, later) in views[name] for who, ask in asked.items() for later in range(ask, number + 2)
            )
            assert members[name]._note_asks(decision) == expected
            views[name] |= asked.items()
            repeats += expected
    assert repeats > 100


def test_the_stall_reason_after_a_cut_is_the_cut_and_it_is_known_when_the_coordinator_has_answered_or_is_silent():
    """The request is still held as far as this island knows; its heartbeats fail first."""
    a, _ = begun(member("a"), member("b"))
    ready(a)
    a.handle(m.Heartbeat(held="the coordinator waits for the requests of b"))
    for now, error in ((2.0, ""), (5.0, "cannot be reached"), (9.0, "cannot be reached")):
        a.handle(m.Tick(now))
        a.handle(m.Heartbeat(error))
    assert a.stall_reason() == "the coordinator has not answered for 7 s (cannot be reached)"
    a.handle(m.Heartbeat(held="the coordinator waits for the requests of b"))
    a.handle(m.Tick(10.3))
    assert a.stall_reason() == "the coordinator has not answered for 1 s", "a heartbeat is on its way for too long"
    a.handle(m.Tick(11.5))
    a.handle(m.Heartbeat(held="the coordinator waits for the requests of b"))
    assert a.stall_reason() == "the coordinator waits for the requests of b"
    a.handle(m.Tick(12.0))
    assert a.is_reason_known(11.0, 0.5)
    assert not a.is_reason_known(11.8, 0.5), "the coordinator may be cut off since its last answer"
    a.handle(m.Tick(12.8))
    assert a.is_reason_known(11.8, 0.5), "it is silent"
    a.handle(m.Heartbeat(held="the coordinator waits for the requests of b"))
    a.handle(m.Tick(13.0))
    assert not a.is_reason_known(11.8, 0.5), "the silence has only just ended"
    a.handle(m.Tick(13.3))
    assert a.is_reason_known(11.8, 0.5)


def test_after_the_first_failed_try_others_that_still_try_are_not_blamed():
    members = begun(member("a"), member("b"))
    ready(*members)
    a = members[0]
    for known in (False, True):  # a second failure hides nothing: tries may fail without end
        (reduce,) = {only(actions, m.Reduce) for actions in all_see(*members)}
        for each in members:
            each.handle(m.ReduceFailed(reduce.key, ()))
        a.handle(m.Heartbeat(held="the coordinator waits for the requests of b"))
        assert a.is_reason_known(0.0, 0.5) == known
        a.handle(m.Tick(a._now + 0.5))
        a.handle(m.Heartbeat(held="the coordinator waits for the requests of b"))
        assert a.is_reason_known(0.0, 0.5)


def test_the_stall_reason_during_a_reduce_names_a_cut_first_and_members_of_the_last_round_that_are_absent():
    a, b, _ = members = begun(*(member(name) for name in "abc"))
    one_round(*members)
    ready(a, b)
    while not a._reducing:
        a.handle(m.Tick(a._now + 1.0))
        b.handle(m.Tick(a._now))
        all_see(a, b)
    a.handle(m.Heartbeat("cannot be reached"))
    began = a._now
    a.handle(m.Tick(began + 1.0))
    assert a.stall_reason() == "round 1 is being reduced by a, b, without c", "one answer may be late"
    a.handle(m.Tick(began + 1.3))
    cut = "the coordinator has not answered for 1 s (cannot be reached)"
    assert a.stall_reason() == f"{cut}; round 1 is being reduced by a, b, without c"


@pytest.mark.parametrize(("round", "from_checkpoint", "needed"), [(NO_ROUND, False, 3), (4, True, 3), (4, False, 2)])
def test_a_view_is_of_use_from_the_number_with_which_a_fleet_may_begin_or_continue(round, from_checkpoint, needed):
    a = Member(member("a").identity, replace(seed("d"), round=round), LAN, Rules(minimum=2, start=3))
    a._from_checkpoint = from_checkpoint
    assert only(a.handle(m.Tick(0.0)), m.RequestView).needed == needed


def test_a_slow_island_that_is_left_alone_hands_over_a_message_for_the_round_that_is_due():
    """Its peer, which was faster, has announced the round and died."""
    a, b = begun(member("a"), member("b"))
    a.handover.early = True
    a.handle(m.RoundDue(0))
    a.handle(view(a, b))
    assert not a.handover.sent
    actions = a.handle(m.ViewReceived(View(1, (a.header, replace(b.header, asked=9, ready=True)))))
    assert only(actions, m.RequestMessage).round == 0


def test_a_message_that_a_reduce_may_use_is_not_replaced_when_its_round_falls_due():
    (a,) = begun(member("a"))
    a.handover.want(0)
    a.handle(m.MessageReady(0, 1.0, 1))
    a._needs_view = True
    assert only(a.handle(m.Tick(1.0)), m.RequestView).header.weight == 1.0
    assert "RequestMessage" not in kinds(a.handle(m.RoundDue()))
    assert a.handover.serves(0)


def test_a_complete_island_serves_those_that_are_behind():
    a, b = begun(member("a"), member("b"))
    for each in (a, b):
        each.rules = replace(each.rules, closing=0)
    a.outer = replace(a.outer, round=1, digest="d1")
    a.handle(m.Tick(0.0))
    assert a.is_complete
    assert not a.may_end
    assert kinds(a.handle(m.Heartbeat(newest=1, behind=1))) == ["RequestView"], "b is healthy"
    assert kinds(b.handle(m.Heartbeat(newest=1, behind=1))) == ["RequestView"], "no peer announces a round any more"
    heal = only(all_see(a, b, id=2)[1], m.Heal)
    assert (heal.round, a.may_end) == (1, False)
    a.handle(m.Heartbeat(newest=1, behind=0))
    assert a.may_end
    for seconds in (LAN.leave_seconds, LAN.linger_seconds):  # of an island that does not come
        a.handle(m.Heartbeat(newest=1, behind=1))
        a.handle(m.Tick(seconds))
    assert a.may_end
