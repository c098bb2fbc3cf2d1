"""Leases: an island takes their examples once, whatever rounds bring; they are refilled, returned and skipped."""

import random
from collections import deque

import pytest

from gregale.islands.protocol.ledger import Lease, LeasePolicy, LeaseReport, Ledger, advance
from gregale.islands.state import DataLeases

BATCH = 4


def leased(examples: int) -> DataLeases:
    leases = DataLeases("a", "s", BATCH)
    leases.update(advance(Ledger(), [LeaseReport("a", "s", 0)], LeasePolicy(examples, BATCH)), "s")
    return leases


def test_batches_are_taken_in_the_order_of_the_lease():
    nothing = DataLeases("a", "s", BATCH)
    assert nothing.take() is None
    assert nothing.is_empty()
    leases = leased(3 * BATCH)
    assert [leases.take() for _ in range(4)] == [0, 4, 8, None]
    assert leases.used_after(0) == 0
    assert leases.used_after(2) == 2 * BATCH
    short = leased(BATCH + 1)
    assert [short.take() for _ in range(2)] == [0, None], "a rest too short for a batch is skipped"
    short.update(Ledger(18, leases=(Lease("a", "t", 0, ((0, 6), (10, 18))),)), "t")
    short.begin_stage(0, BATCH)
    assert [short.take() for _ in range(4)] == [0, 10, 14, None], "and no more than that rest"


def test_counts_that_are_not_asked_for_again_are_forgotten():
    leases = leased(100 * BATCH)
    for batch in range(1, 101):
        assert leases.take() is not None
        assert leases.used_after(batch) == batch * BATCH
    assert sum(len(value) for value in vars(leases).values() if isinstance(value, list | deque)) == 0


@pytest.mark.parametrize("seed", range(20))
def test_two_islands_never_take_the_same_example(seed):
    """Rounds at random moments, with what was trained on reported late: batches are made ahead of time."""
    source, lease_policy = random.Random(seed), LeasePolicy(8 * BATCH, 4 * BATCH)
    islands = {name: DataLeases(name, name, BATCH) for name in "ab"}
    trained, taken, seen = dict.fromkeys(islands, 0), dict.fromkeys(islands, 0), set()
    ledger = Ledger()
    for _ in range(60):
        reports = [LeaseReport(name, name, each.used_after(trained[name])) for name, each in islands.items()]
        ledger = advance(ledger, reports, lease_policy)
        for name, leases in islands.items():
            leases.update(ledger, name)
            for _ in range(source.randrange(5)):
                if (first := leases.take()) is not None:
                    assert not seen & set(range(first, first + BATCH))
                    seen |= set(range(first, first + BATCH))
                    taken[name] += 1
            trained[name] = source.randint(trained[name], taken[name])
    assert len(seen) == BATCH * sum(taken.values()) > 0


def test_the_next_stage_has_leases_of_its_own_and_until_then_the_old_one_goes_on():
    lease_policy, leases = LeasePolicy(8, 4), DataLeases("a", "s", BATCH)
    ledger = advance(Ledger(), [LeaseReport("a", "s", 0, batch=BATCH)], lease_policy)
    leases.update(ledger, "s")
    assert [leases.take(), leases.used_after(1)] == [0, BATCH]
    ledger = advance(ledger.next_stage(), [LeaseReport("a", "s", 0, batch=2)], lease_policy)
    assert (ledger.stages, ledger.skipped, ledger.next) == ((32,), 32, 32 + 16)
    leases.update(ledger, "s")
    assert leases.take() == BATCH, "nothing of the other stage"
    leases.begin_stage(1, 2)
    assert [leases.take() for _ in range(2)] == [32, 34]
    assert leases.used_after(1) == 2


LOT = LeasePolicy(size=10, low=5)


def test_leases_are_refilled_from_returned_examples():
    ledger = advance(Ledger(), [LeaseReport("a", "s", 0), LeaseReport("b", "t", 0)], LOT)
    assert [lease.spans for lease in ledger.leases] == [((0, 10),), ((10, 20),)]
    ledger = advance(ledger, [LeaseReport("a", "s", 4, leaving=True), LeaseReport("b", "t", 3)], LOT)
    assert ledger.free == ((4, 10),)
    assert [lease.spans for lease in ledger.leases] == [((13, 20),)]
    ledger = advance(ledger, [LeaseReport("b", "t", 6)], LOT)
    assert ledger.leases[0].spans == ((16, 20), (4, 10), (20, 24))
    ledger = advance(ledger, [LeaseReport("b", "t", 6 + 4 + 3)], LOT)
    assert ledger.leases[0].spans == ((7, 10), (20, 24))


def test_a_dead_islands_rest_is_skipped_once_it_is_back():
    ledger = advance(Ledger(), [LeaseReport("a", "s", 0)], LOT)
    assert advance(ledger, [], LOT) == ledger
    ledger = advance(ledger, [LeaseReport("a", "new", 0)], LOT)
    assert ledger.skipped == 10
    assert ledger.leases[0].spans == ((10, 20),)


def test_islands_are_leased_batches_of_their_own_size():
    ledger = advance(Ledger(), [LeaseReport("a", "s", 0, batch=2), LeaseReport("b", "s", 0, batch=5)], LOT)
    assert [lease.left() for lease in ledger.leases] == [20, 50]
    ledger = advance(ledger, [LeaseReport("a", "s", 8, batch=2), LeaseReport("b", "s", 30, batch=5)], LOT)
    assert [lease.left() for lease in ledger.leases] == [12, 20 + 50]  # a has 6 of its batches, b had 4
