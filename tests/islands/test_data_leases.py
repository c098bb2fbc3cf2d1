"""The examples that an island takes are those of its leases, each once, whatever the rounds bring."""

from __future__ import annotations

import random

import pytest

from gregale.islands.data_leases import DataLeases
from gregale.islands.protocol.ledger import LeasePolicy, LeaseReport, Ledger, advance

BATCH = 4


def spread(first: int) -> set[int]:
    return set(range(first, first + BATCH))


def test_no_batch_is_taken_before_there_is_a_lease():
    leases = DataLeases("a", "s", BATCH)
    assert leases.take() is None
    assert leases.is_empty()


def test_batches_are_taken_in_the_order_of_the_lease():
    leases = DataLeases("a", "s", BATCH)
    leases.update(advance(Ledger(), [LeaseReport("a", "s", 0)], LeasePolicy(3 * BATCH, BATCH)), "s")
    assert [leases.take() for _ in range(4)] == [0, 4, 8, None]
    assert leases.used_after(0) == 0
    assert leases.used_after(2) == 2 * BATCH


@pytest.mark.parametrize("seed", range(20))
def test_two_islands_never_take_the_same_example(seed):
    """Rounds at random moments, with what was trained on reported late: batches are made ahead of time."""
    source, lease_policy = random.Random(seed), LeasePolicy(8 * BATCH, 4 * BATCH)
    islands = {name: DataLeases(name, name, BATCH) for name in "ab"}
    trained, taken, seen = dict.fromkeys(islands, 0), dict.fromkeys(islands, 0), set()
    ledger = Ledger()
    for _ in range(60):
        ledger = advance(
            ledger, [LeaseReport(n, n, each.used_after(trained[n])) for n, each in islands.items()], lease_policy
        )
        for name, leases in islands.items():
            leases.update(ledger, name)
            for _ in range(source.randrange(5)):
                if (first := leases.take()) is not None:
                    assert not seen & spread(first)
                    seen |= spread(first)
                    taken[name] += 1
            trained[name] = source.randint(trained[name], taken[name])
    assert len(seen) == BATCH * sum(taken.values()) > 0


def test_a_rest_too_short_for_a_batch_is_skipped():
    leases = DataLeases("a", "s", BATCH)
    leases.update(advance(Ledger(), [LeaseReport("a", "s", 0)], LeasePolicy(BATCH + 1, BATCH)), "s")
    assert leases.take() == 0
    assert leases.take() is None
