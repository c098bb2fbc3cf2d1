"""A run whose mixture changes: which row each example is, and how many are of each source."""

from collections import Counter, defaultdict
from itertools import accumulate, pairwise

import pytest

from gregale.data.examples import Windows, training_examples
from gregale.data.mixtures import drawn, sources_of, staged_examples, tokens_of, with_mixture
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


REPLICAS = [  # the number of examples of each replica, and its mixture
    (30, [{"web": 1.0, "code": 3.0}, {"code": 1.0}]),
    (20, [{"math": 1.0, "web": 1.0, "code": 2.0}, {"web": 1.0, "code": 3.0}]),
    (17, [{"math": 3.0, "web": 1.0}, {"math": 1.0, "web": 1.0}]),
    (40, [{"code": 1.0}, {"web": 2.0, "code": 6.0}]),
]


def slow_replicas(rows, stages):
    """The rows of each replica, by stage: [stage][replica][example] (source, row)."""
    parts, seen, shares = defaultdict(lambda: [([], []), ([], [])]), Counter(), {}

    def split(values, weights):
        ends = [round(len(values) * each / sum(weights)) for each in accumulate(weights, initial=0.0)]
        return [values[start:stop] for start, stop in pairwise(ends)]

    for count, mixtures in stages:
        for name, own in rows.items():
            now = [mixture.get(name, 0) / sum(mixture.values()) for mixture in mixtures]
            if any(now) and now != shares.get(name):
                firsts, epochs = zip(*parts[name], strict=True)
                past = [max(0, seen[name, k] - len(firsts[k])) / max(1, len(epochs[k])) for k in (0, 1)]
                lists = [firsts[k] + epochs[k] * -int(-max(past) // 1) for k in (0, 1)]
                left = [row for k in (0, 1) for row in lists[k][seen.pop((name, k), 0) :]]
                parts[name] = list(zip(split(left, now), split(list(range(len(own))), now), strict=True))
                shares[name] = now
        found = [[], []]
        for k, mixture in enumerate(mixtures):
            for name, _ in slow_order([(count, {each: mixture[each] for each in rows if each in mixture})]):
                first, epoch = parts[name][k]
                found[k].append((name, (first + epoch * 99)[seen[name, k]]))
                seen[name, k] += 1
        yield found


def test_a_source_of_replicas_goes_on_where_all_of_them_have_stopped(rows):
    """Its use may move from one replica to the other: the rest of its epoch is then divided anew."""
    mixtures, first, told = (), 0, Counter()
    for (count, own), expected in zip(REPLICAS, slow_replicas(rows, REPLICAS), strict=True):
        mixtures = with_mixture(mixtures, 2 * first, {}, LENGTH, own)
        examples, first = staged_examples(rows, mixtures, None), first + count
        batch = examples.batch(2 * (first - count), 2 * count, range(2 * count))["tokens"][:, 0].reshape(2, -1)
        offsets = {"web": 0, "code": 100, "math": 200}
        assert batch.tolist() == [[offsets[name] + row for name, row in one] for one in expected]
        told.update(pair for one in expected for pair in one)
        for name, each in rows.items():
            times = [told[name, row] for row in range(len(each))]
            assert max(times) - min(times) <= 1, "no row comes again before all have come"
    assert sources_of(mixtures) == ["web", "code", "math"]


def test_shuffled_replicas_have_each_row_once_in_an_epoch(rows):
    """Also those that two replicas have left when their use of the source changes; the parts are shuffled anew."""
    stages = [[{"code": 1.0, "web": 1.0}, {"code": 3.0, "web": 1.0}], [{"code": 1.0}, {"code": 2.0, "web": 1.0}]]
    mixtures = with_mixture(with_mixture((), 0, {}, LENGTH, stages[0]), 16, {}, LENGTH, stages[1])
    before = staged_examples(rows, mixtures[:1], 5).batch(0, 16, range(16))["tokens"][:, 0]
    after = staged_examples(rows, mixtures, 5).batch(16, 200, range(200))["tokens"][:, 0].reshape(2, -1)
    left = set(range(100, 131)) - set(before.tolist())
    of_code = [[int(token) for token in one if token >= 100] for one in after]
    counts = [round(len(left) * 3 / 5), len(left) - round(len(left) * 3 / 5)]
    assert {token for one, count in zip(of_code, counts, strict=True) for token in one[:count]} == left
    assert sorted(of_code[0][counts[0] : counts[0] + 19]) != of_code[0][counts[0] : counts[0] + 19]
