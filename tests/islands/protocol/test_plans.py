"""What a decision and its plan hand to all members that follow it."""

import random
from dataclasses import replace

from gregale.islands.protocol.decision import decide
from gregale.islands.protocol.headers import Generation, Header, Peer, View
from gregale.islands.protocol.ledger import Ledger, Lot, Report, advance
from gregale.islands.protocol.plans import NO_ASKS, Form, Turn
from gregale.islands.protocol.settings import LAN, Rules

REPORTS = (Report("a", "s", 30), Report("b", "s", 0))
RULES = Rules(lot=Lot(40, 24))


def test_asks_are_remembered_as_by_one_dictionary_a_member():
    rng, islands = random.Random(0), "abcdefgh"
    numbers = dict.fromkeys(islands, 0)
    members = {name: (NO_ASKS, {}) for name in islands}
    repeats = 0
    for number in range(400):
        present = sorted(rng.sample(islands, rng.randrange(1, 9)))
        for name in present:
            numbers[name] += rng.random() < 0.9  # else an older ask comes again
        asked = {f"{name}/s": max(1, numbers[name] - (rng.random() < 0.1)) for name in present}
        headers = (Header(name, "s", asked[f"{name}/s"], "", "", (name,)) for name in present)
        decision = decide(View(number, tuple(headers)), Rules())
        for name in present:
            asks, known = members[name]
            asks, repeated = decision.after(asks)
            assert repeated == any(known.get(who, 0) >= ask for who, ask in asked.items())
            known = known | {who: max(ask, known.get(who, 0)) for who, ask in asked.items()}
            assert asks.newest | asks.others == known
            members[name] = asks, known
            repeats += repeated
    assert repeats > 100


def test_the_next_ledger_is_made_once_for_all():
    turn = Turn(Generation(2, "g"), (), None, False, "gone", reports=REPORTS)
    form = Form("k", 1, (), (), (), 2, frozenset(), reports=REPORTS)
    for plan in (turn, form):
        ledger = plan.ledger_after(Ledger(), RULES)
        assert ledger == advance(Ledger(), REPORTS, RULES.lot)
        assert plan.ledger_after(Ledger(), RULES) is ledger
        assert plan.ledger_after(ledger, RULES) == advance(ledger, REPORTS, RULES.lot)
        assert plan.ledger_after(Ledger(), Rules()) == advance(Ledger(), REPORTS, Lot()) != ledger


def test_who_is_missing_is_found_once_for_all_who_share_a_group(header):
    a, b = Peer("a", "s", ("a:1",)), Peer("b", "s", ("b:1",))
    decision, group = decide(View(7, (header("a"), header("c"))), Rules()), (a, b)
    assert decision.missing(group) == (b,)
    assert decision.missing(group) is decision.missing(group)
    assert decision.missing((a,)) == ()


def test_an_ask_is_given_up_after_the_longest_time_in_which_a_coordinator_answers():
    timing = replace(LAN, heartbeat_seconds=30.0)
    assert timing.ask_seconds > timing.heartbeat_seconds + timing.join_seconds
