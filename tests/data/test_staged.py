"""A run whose mixture changes: which row each example is, and how many are of each source."""

from collections import Counter

import pytest

from gregale.data.examples import Windows, training_examples
from gregale.data.staged import drawn, from_json, sources_of, staged_examples, to_json, with_mixture
from tests.data.conftest import stream_of

LENGTH = 4
STAGES = [
    (40, {"web": 1.0, "code": 3.0}),
    (33, {"code": 1.0, "math": 0.7, "web": 0.3}),
    (20, {"web": 0.0, "math": 2.0}),
]


@pytest.fixture
def rows(make_store):
    """Three sources of 7, 31 and 12 windows, whose tokens tell them apart."""

    def windows(count: int, first: int) -> Windows:
        tokens = [first + place // LENGTH for place in range(count * LENGTH)]
        return Windows(stream_of(make_store([tokens])), LENGTH, False)

    return {"web": windows(7, 0), "code": windows(31, 100), "math": windows(12, 200)}


def mixtures_of(stages):
    found, first = (), 0
    for count, weights in stages:
        found, first = with_mixture(found, first, weights), first + count
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
    examples = staged_examples(rows, from_json(to_json(mixtures_of(STAGES))), seed)
    alone = {name: training_examples({name: each}, {name: 1.0}, seed) for name, each in rows.items()}
    order = list(slow_order(STAGES))
    found = [int(examples[index]["tokens"][0]) for index in reversed(range(len(order)))][::-1]
    assert found == [int(alone[name][number]["tokens"][0]) for name, number in order]
    for name, own in rows.items():
        seen = [number % len(own) for source, number in order if source == name]
        assert set(Counter(seen[: len(own)]).values()) == {1}, "no row comes twice in an epoch"
    assert examples.endless


def test_the_sources_of_each_stage_are_counted_exactly():
    order, first = [name for name, _ in slow_order(STAGES)], 0
    for count, weights in STAGES:
        for n in range(count):
            assert drawn(weights, n) == Counter(order[first : first + n])
        first += count
    assert drawn({"a": 1.0, "b": 3.0}, 4000) == {"a": 1000, "b": 3000}


def test_one_mixture_is_the_order_of_a_run_without_stages(rows):
    weights = {"web": 1.0, "code": 2.5, "math": 1.2}
    plain, staged = training_examples(rows, weights, 3), staged_examples(rows, with_mixture((), 0, weights), 3)
    assert all((plain[i]["tokens"] == staged[i]["tokens"]).all() for i in range(50))


def test_what_changes_nothing_adds_no_mixture():
    one = with_mixture((), 0, {"a": 1.0, "b": 0.0})
    assert with_mixture(one, 8, {"a": 1.0, "b": 0.0}) == one
    two = with_mixture(one, 8, {"b": 1.0, "a": 1.0})
    assert with_mixture(two, 8, {"a": 2.0, "c": 1.0}) == with_mixture(one, 8, {"a": 2.0, "c": 1.0}), "nothing was drawn"
    assert [sources_of(each) for each in (one, two)] == [["a"], ["a", "b"]]
