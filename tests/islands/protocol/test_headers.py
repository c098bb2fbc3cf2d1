"""Headers and records survive the wire; garbage is refused with one clear error."""

import json
from dataclasses import asdict

import pytest

from gregale.islands.protocol import messages as m
from gregale.islands.protocol.ledger import LeasePolicy, LeaseReport, Ledger, advance
from gregale.islands.protocol.outliers import Size


def sent(*values) -> list[m.Header | m.GarbageError]:
    """The headers with these values as a member gets them from the coordinator."""
    return received(*({key: json.dumps(value) for key, value in each.items()} for each in values))


def received(*texts) -> list[m.Header | m.GarbageError]:
    return m.decode_all(m.Header, m.read_texts(json.loads(json.dumps(m.pack(texts)))), "header")


def test_headers_survive_their_way_through_the_coordinator(header):
    held = m.AcceptedResult("k", 2, "d", ("a/s", "b/s"), ("a/s",))
    for headers in (
        [header("a")],
        [header("a"), header("b", held=held, unreachable=("a",)), header("c", held=held, usual=Size(0.5, 2.0))],
        [header(name, weight=number / 3, seen=1, failures=1) for number, name in enumerate("abcd")],
    ):
        assert sent(*(asdict(each) for each in headers)) == headers


def test_a_view_has_common_values_once(header):
    """256 members, all of which hold the same result of all of them, as after every reduce."""
    identities = tuple(f"island-{number:03}/0123456789abcdef" for number in range(256))
    held = m.AcceptedResult("k", 2, "d", identities, identities)
    headers = [
        header(each, held=held, agreement="x" * 3000, weight=1.0 + place / 3) for place, each in enumerate(identities)
    ]
    assert len(json.dumps(asdict(headers[0]))) > 14_000
    assert len(json.dumps(m.pack([m.to_texts(asdict(each)) for each in headers]))) < 100_000


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "[", "", "nul", '"' + "[" * 100_000, "[" * 100_000])
def test_only_the_header_with_a_text_that_is_not_json_is_garbage(header, text):
    first, second = received(m.to_texts(asdict(header("a"))), m.to_texts(asdict(header("b"))) | {"held": text})
    assert first == header("a")
    assert isinstance(second, m.GarbageError)


def test_a_record_survives_json():
    outer = m.OuterRecord(
        m.seed("d").generation, 3, "d", "k", 2, advance(Ledger(), [LeaseReport("a", "s", 0)], LeasePolicy())
    )
    assert m.OuterRecord.from_json(json.loads(json.dumps(outer.to_json()))) == outer
    assert outer.fingerprint() != m.OuterRecord(outer.generation, 3, "d", "k", 2, Ledger()).fingerprint()


@pytest.mark.parametrize(
    "change",
    [
        {"round": "5"}, {"round": -2}, {"voter": 1}, {"weight": float("nan")}, {"weight": -1.0}, {"name": None},
        {"hosts": [1]}, {"generation": [1]}, {"generation": ["x", 1]}, {"held": {"key": "k"}}, {"seen": True},
        {"used": 1.5}, {"usual": [0.0]}, {"ready": None},
    ],
)  # fmt: skip
def test_only_the_header_with_a_wrong_field_is_garbage(header, change):
    headers = [header(name) for name in "abc"]
    values = [asdict(each) for each in headers]
    values[1] |= change
    if change == {"ready": None}:
        del values[1]["ready"]
    first, second, third = sent(*values)
    assert [first, third] == headers[::2]
    assert isinstance(second, m.GarbageError)


@pytest.mark.parametrize(
    "change",
    [
        {"ledger": None}, {"ledger": []}, {"ledger": {}}, {"ledger": {"next": 0}}, {"next": -1}, {"free": 3},
        {"free": [[9, 2]]}, {"leases": [["a", "s", 0, [[9, 2]]]]}, {"leases": [["a", "s", 0]]}, {"skipped": True},
        {"sizes": [[1.0]]}, {"round": -2},
    ],
)  # fmt: skip
def test_a_record_with_a_wrong_field_is_garbage(change):
    value = m.seed("d").to_json()
    whole = {name: change.pop(name) for name in list(change) if name in value}
    with pytest.raises(m.GarbageError):
        m.OuterRecord.from_json(value | {"ledger": value["ledger"] | change} | whole)
