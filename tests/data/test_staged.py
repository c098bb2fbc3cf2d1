"""A run whose mixture changes: which row each example is, and how many are of each source."""

from collections import Counter

import pytest

from gregale.data.examples import Windows, training_examples
from gregale.data.mixtures import drawn, sources_of, staged_examples, tokens_of, with_mixture
from tests.data.conftest import numbered

LENGTH = 4
STAGES = [
    (40, {"web": 1.0, "code": 3.0}),
    (33, {"code": 1.0, "math": 0.7, "web": 0.3}),
    (20, {"web": 0.0, "math": 2.0}),
]


@pytest.fixture
def rows():
    """Three sources of 7, 31 and 12 windows, whose tokens tell them apart."""
    return {"web": numbered(7, 0), "code": numbered(31, 100), "math": numbered(12, 200)}


def drawn_tokens(rows, stages, seed):
    """The first token of each example, as the run of each stage has it."""
    mixtures, first, found = (), 0, []
    for count, weights in stages:
        mixtures = with_mixture(mixtures, first, weights, LENGTH)
        examples, first = staged_examples(rows, mixtures, seed), first + count
        assert examples.endless
        found += [int(examples[index]["tokens"][0]) for index in reversed(range(first - count, first))][::-1]
    assert tokens_of(mixtures, first) == first * LENGTH
    return found


def slow_order(stages):
    """Each example's source and its number among those of its source, one example at a time."""
    taken = Counter()
    for count, weights in stages:
        smallest = min(filter(None, weights.values()))
        for k in range(count):
            before, now, total = k, k + 1, sum(round(100 * weight / smallest) for weight in weights.values())
            for name, weight in weights.items():
                share = round(100 * weight / smallest)
                rest = before * (total - share) // total, now * (total - share) // total
                if now - rest[1] > before - rest[0]:
                    yield name, taken[name]
                    taken[name] += 1
                    break
                before, now, total = *rest, total - share


@pytest.mark.parametrize("seed", [None, 5])
def test_a_source_goes_on_where_the_mixture_before_has_stopped(rows, seed):
    alone = {name: training_examples({name: each}, {name: 1.0}, seed) for name, each in rows.items()}
    order = list(slow_order(STAGES))
    assert drawn_tokens(rows, STAGES, seed) == [int(alone[name][number]["tokens"][0]) for name, number in order]
    for name, own in rows.items():
        seen = [number % len(own) for source, number in order if source == name]
        assert set(Counter(seen[: len(own)]).values()) == {1}, "no row comes twice in an epoch"


def test_the_sources_of_each_stage_are_counted_exactly():
    order, first = [name for name, _ in slow_order(STAGES)], 0
    for count, weights in STAGES:
        for n in range(count):
            assert drawn(weights, n) == Counter(order[first : first + n])
        first += count
    assert drawn({"a": 1.0, "b": 3.0}, 4000) == {"a": 1000, "b": 3000}


def test_rows_of_each_length_have_epochs_of_their_own(rows):
    """Rows of 8 tokens begin with their first; later rows of 4 go on after those of 4 that were seen."""
    longer = {name: Windows(each.stream, 8, False) for name, each in rows.items()}
    mixtures = ()
    for first, length in ((0, LENGTH), (9, 8), (14, LENGTH)):
        mixtures = with_mixture(mixtures, first, {"code": 1.0}, length)
        examples = staged_examples(longer if length == 8 else rows, mixtures, 5)
        alone = training_examples({"code": (longer if length == 8 else rows)["code"]}, {"code": 1.0}, 5)
        before = {0: 0, 9: 0, 14: 9}[first]
        for index in range(4):
            assert (examples[first + index]["tokens"] == alone[before + index]["tokens"]).all()
    assert tokens_of(mixtures, 15) == 9 * LENGTH + 5 * 8 + LENGTH


def test_what_changes_nothing_adds_no_mixture():
    one = with_mixture((), 0, {"a": 1.0, "b": 0.0}, 8)
    assert with_mixture(one, 8, {"a": 1.0, "b": 0.0}, 8) == one
    two = with_mixture(one, 8, {"b": 1.0, "a": 1.0}, 8)
    last = {"a": 2.0, "c": 1.0}
    assert with_mixture(two, 8, last, 8) == with_mixture(one, 8, last, 8), "nothing was drawn in between"
    assert [sources_of(each) for each in (one, two)] == [["a"], ["a", "b"]]


def test_replicas_go_on_in_their_parts_after_rows_of_another_length(rows):
    """One stage, or two of which rows of another length were between: each row comes once in an epoch of its part."""
    own = [{"code": 1.0, "web": 1.0}, {"code": 3.0, "web": 1.0}]
    mixtures = with_mixture((), 0, {}, LENGTH, own)
    whole = staged_examples(rows, mixtures, 5).batch(0, 80, range(80))["tokens"].reshape(2, 40, -1)
    mixtures = with_mixture(with_mixture(mixtures, 24, {}, 8, own), 30, {}, LENGTH, own)
    assert len(mixtures) == 3
    after = staged_examples(rows, mixtures, 5).batch(30, 40, range(40))["tokens"].reshape(2, 20, -1)
    assert (after == whole[:, 12:32]).all()
    assert sources_of(mixtures) == ["code", "web"]
