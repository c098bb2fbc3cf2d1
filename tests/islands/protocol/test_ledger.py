"""Leases are refilled, returned and skipped; the simulator shows that no example is used twice in any history."""

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
