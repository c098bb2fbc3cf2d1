"""Headers and records survive the wire; garbage is refused with one clear error."""

import json

import pytest

from gregale.islands.protocol.headers import AcceptedResult, GarbageError, Header, OuterRecord, seed
from gregale.islands.protocol.ledger import LeasePolicy, LeaseReport, Ledger, advance


def test_a_header_survives_json(header):
    for each in (
        header("a"),
        header("b", held=AcceptedResult("k", 2, "d", ("a/s", "b/s"), ("a/s",)), unreachable=("a",)),
    ):
        assert Header.from_json(each.to_json()) == each


def test_a_record_survives_json():
    outer = OuterRecord(
        seed("d").generation, 3, "d", "k", 2, advance(Ledger(), [LeaseReport("a", "s", 0)], LeasePolicy())
    )
    assert OuterRecord.from_json(json.loads(json.dumps(outer.to_json()))) == outer
    assert outer.fingerprint() != OuterRecord(outer.generation, 3, "d", "k", 2, Ledger()).fingerprint()


@pytest.mark.parametrize(
    "change",
    [
        {"round": "5"}, {"round": -2}, {"voter": 1}, {"weight": float("nan")}, {"weight": -1.0}, {"name": None},
        {"hosts": [1]}, {"generation": [1]}, {"generation": ["x", 1]}, {"held": {"key": "k"}}, {"seen": True},
        {"used": 1.5}, {"more": 1},
    ],
)  # fmt: skip
def test_a_header_with_a_wrong_field_is_garbage(header, change):
    with pytest.raises(GarbageError):
        Header.from_json(json.dumps(json.loads(header("a").to_json()) | change))


@pytest.mark.parametrize("text", ["", "x", "[]", "null", "{}", "[" * 100_000])
def test_other_json_is_garbage(text):
    with pytest.raises(GarbageError):
        Header.from_json(text)


@pytest.mark.parametrize(
    "change",
    [
        {"ledger": None}, {"ledger": []}, {"ledger": {}}, {"ledger": {"next": 0}}, {"next": -1}, {"free": 3},
        {"free": [[9, 2]]}, {"leases": [["a", "s", 0, [[9, 2]]]]}, {"leases": [["a", "s", 0]]}, {"skipped": True},
        {"sizes": [[0.0, 1.0]]}, {"sizes": [[1.0]]}, {"round": -2},
    ],
)  # fmt: skip
def test_a_record_with_a_wrong_field_is_garbage(change):
    value = seed("d").to_json()
    whole = {name: change.pop(name) for name in list(change) if name in value}
    with pytest.raises(GarbageError):
        OuterRecord.from_json(value | {"ledger": value["ledger"] | change} | whole)


def test_a_record_of_an_earlier_version_has_no_sizes():
    value = seed("d").to_json()
    del value["sizes"]
    assert OuterRecord.from_json(value) == seed("d")
