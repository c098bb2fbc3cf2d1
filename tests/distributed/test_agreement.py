"""Settings that have to agree: as text, and what differs between them."""

import pytest

from gregale.distributed.agreement import difference, format_term, from_text, to_text


def test_the_first_key_is_told_with_its_values_and_whose_they_are_and_other_keys_by_name():
    found = {
        "a": {"steps": "9", "seed": "0", "x": "1"},
        "b": {"steps": "9", "seed": "5"},
        "c": {"steps": "9", "x": "1"},
    }
    assert difference(found) == "seed is 0 in a, but 5 in b, but not set in c; also different: x"
    assert difference({"a": found["a"], "b": found["a"]}) == ""


def test_a_message_is_one_line_with_the_first_of_many_members_and_keys_whatever_they_are():
    keys = [f"k{number}" for number in range(8)]
    found = {f"p{number}": dict.fromkeys(keys, "1" if number < 7 else "2") for number in range(8)}
    holders = "p0, p1, p2, p3, p4 and 2 more, but 2 in p7"
    assert difference(found) == f"k0 is 1 in {holders}; also different: k1, k2, k3, k4, k5 and 2 more"
    text = difference({name: {"sources.a\x1b[1m": value} for name, value in (("a", "\n\n"), ("b", "x" * 999))})
    assert text.isprintable()
    assert len(text) < 200


@pytest.mark.parametrize("text", ["y", "[1]", '{"a": 1}', "[" * 100_000], ids=lambda text: text[:9])
def test_terms_travel_as_text_and_anything_else_differs_from_them(text):
    terms = {"steps": "9", "samples.prompts": format_term(["a", "b\n"])}
    assert from_text(to_text(terms)) == terms
    assert difference({"a": terms, "b": from_text(text)}) != ""
