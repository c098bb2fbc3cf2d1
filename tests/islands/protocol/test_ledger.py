"""No example is leased twice, whatever the fleet's history."""

import json
import random
from dataclasses import replace

import pytest

from gregale.islands.protocol.headers import OuterRecord, seed
from gregale.islands.protocol.ledger import LeasePolicy, LeaseReport, Ledger, advance

LOT = LeasePolicy(size=10, low=5)


def test_leases_are_refilled_from_returned_examples():
    ledger = advance(Ledger(), [LeaseReport("a", "s", 0), LeaseReport("b", "t", 0)], LOT)
    assert [lease.spans for lease in ledger.leases] == [((0, 10),), ((10, 20),)]
    ledger = advance(ledger, [LeaseReport("a", "s", 4, leaving=True), LeaseReport("b", "t", 3)], LOT)
    assert ledger.free == ((4, 10),)
    assert [lease.spans for lease in ledger.leases] == [((13, 20),)]
    ledger = advance(ledger, [LeaseReport("b", "t", 6)], LOT)
    assert ledger.leases[0].spans == ((16, 20), (4, 10), (20, 24))


def test_a_dead_islands_rest_is_skipped_once_it_is_back():
    ledger = advance(Ledger(), [LeaseReport("a", "s", 0)], LOT)
    assert advance(ledger, [], LOT) == ledger
    ledger = advance(ledger, [LeaseReport("a", "new", 0)], LOT)
    assert ledger.skipped == 10
    assert ledger.leases[0].spans == ((10, 20),)


@pytest.mark.parametrize("history", range(30))
def test_no_example_is_used_twice_in_a_random_history(history):
    rng = random.Random(history)
    ledger, used, holders, counts = Ledger(), {}, {}, {}
    known = {}  # the ledger that each island has: an absent one's is old
    for number in range(60):
        for name in rng.sample("abcdef", rng.randint(0, 2)):
            holders[name], counts[name] = f"{name}{number}", 0  # dies and comes back
            known[name] = ledger
        present = [name for name in holders if rng.random() < 0.7]
        for name in holders:
            lease = known[name].lease(name, holders[name])
            spans = lease.after(counts[name]).spans if lease else ()
            examples = [example for start, stop in spans for example in range(start, stop)]
            for example in examples[: rng.randint(0, 6)]:
                assert used.setdefault(example, (name, number)) == (name, number)
                counts[name] += 1
        leaver = rng.choice(present) if present and rng.random() < 0.2 else None
        reports = [
            LeaseReport(name, holders[name], counts[name], name == leaver) for name in rng.sample(present, len(present))
        ]
        ledger = advance(ledger, reports, LOT)
        if leaver:
            del holders[leaver]
        known |= dict.fromkeys(present, ledger)
        assert (
            OuterRecord.from_json(json.loads(json.dumps(replace(seed(""), ledger=ledger).to_json()))).ledger == ledger
        )
    assert ledger.next > 60


def test_islands_are_leased_batches_of_their_own_size():
    ledger = advance(Ledger(), [LeaseReport("a", "s", 0, batch=2), LeaseReport("b", "s", 0, batch=5)], LOT)
    assert [lease.left() for lease in ledger.leases] == [20, 50]
    ledger = advance(ledger, [LeaseReport("a", "s", 8, batch=2), LeaseReport("b", "s", 30, batch=5)], LOT)
    assert [lease.left() for lease in ledger.leases] == [12, 20 + 50]  # a has 6 of its batches, b had 4
