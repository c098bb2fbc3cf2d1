"""What a decision and its plan tell the members that follow it, and the asks that a member remembers."""

import random
from dataclasses import replace

from gregale.islands.protocol.decision import decide
from gregale.islands.protocol.headers import Header, Peer, View, seed
from gregale.islands.protocol.member_state import Identity, MemberState
from gregale.islands.protocol.settings import LAN, Rules


def test_a_view_with_a_request_of_an_earlier_view_is_recognised():
    rng, islands = random.Random(0), "abcdefgh"
    numbers = dict.fromkeys(islands, 0)
    members = {name: MemberState(Identity(name, "s", "", "", ()), seed(""), LAN, Rules()) for name in islands}
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


def test_missing_members_of_a_group(header):
    a, b = Peer("a", "s", ("a:1",)), Peer("b", "s", ("b:1",))
    decision = decide(View(7, (header("a"), header("c"))), Rules())
    assert decision.missing((a, b)) == (b,)
    assert decision.missing((a,)) == ()


def test_a_request_expires_after_the_longest_answer_time_of_a_coordinator():
    timing = replace(LAN, heartbeat_seconds=30.0)
    assert timing.ask_seconds > timing.heartbeat_seconds + timing.join_seconds
