"""The reducer over a network: averages, bytes, order, feedback, and what all members agree on."""

from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np
import pytest

from gregale.codecs.codec import Codec, FeedbackConfig, ReduceConfig, load
from gregale.communication.quantised import EXACT, RowLayout, rows_of
from gregale.islands.network_reducer import NetworkReducer, Reduced, owners
from tests.communication.links import ThreadLink, all_together

EXACTLY = ReduceConfig()
FOUR_BITS = ReduceConfig(codec="int4", gather_codec="int4")
ONE_PHASE = ReduceConfig(codec="topk", block=64, keep=8, phases=1)
SIZES = {"wide|0,0": 1000, "wide|0,1": 1000, "norm|0": 13, "gain|": 1, "deep|0": 512}
MOST, BUCKET = 256, 700  # bytes: wide is four rows, and there are more buckets than members


@cache
def cut(config: ReduceConfig) -> dict[str, RowLayout]:
    return {key: rows_of(size, config, exact=key == "gain|", max_values=MOST) for key, size in SIZES.items()}


def values_of(member: int, round_number: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng([member, round_number])
    return {key: random.normal(size=size).astype(np.float32) for key, size in SIZES.items()}


@partial(jax.jit, static_argnums=(0, 1))
def encoded(codec: Codec, rows: RowLayout, values: jax.Array) -> jax.Array:
    return codec.encode(rows.to_rows(values))


@partial(jax.jit, static_argnums=(0, 1))
def passed_on(codec: Codec, rows: RowLayout, values: jax.Array) -> jax.Array:
    """Values that were encoded and decoded."""
    return rows.from_rows(codec.decode(codec.encode(rows.to_rows(values)), rows.row))


def messages_of(values: dict[str, np.ndarray], config: ReduceConfig) -> dict[str, np.ndarray]:
    found = {}
    for key, rows in cut(config).items():
        found[key] = np.asarray(encoded(rows.first_codec(config), rows, values[key]))
    return found


def reduced(config: ReduceConfig, weights, errors=None, round_number=0, kind=ThreadLink, parts=()):
    """What every member gets, with the links: of members whose values are `values_of`."""
    reducer = NetworkReducer(config, cut(config), BUCKET)

    def member(link: ThreadLink) -> tuple[Reduced, ThreadLink]:
        sends = weights[link.rank] > 0
        messages = messages_of(values_of(link.rank, round_number), config) if sends else None
        error = None if errors is None else errors[link.rank]
        return reducer.reduce(messages, weights, link, error, timeout_seconds=20, parts=parts), link

    return all_together(len(weights), member, kind)


def by_hand(weights, config: ReduceConfig, round_number=0) -> dict[str, np.ndarray]:
    """The first phase's average in float64, in one piece."""
    total = {key: np.zeros(size) for key, size in SIZES.items()}
    for rank, weight in enumerate(weights):
        for key, rows in cut(config).items():
            sent = passed_on(rows.first_codec(config), rows, values_of(rank, round_number)[key])
            total[key] += weight / sum(weights) * np.asarray(sent, np.float64)
    return total


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        *((EXACTLY, weights) for weights in ((1, 1), (2, 5, 1), (4, 0, 1, 2))),
        *((FOUR_BITS, weights) for weights in ((3,), (2, 5, 1), (0, 0, 7))),
        *((ONE_PHASE, weights) for weights in ((3,), (4, 0, 1, 2))),
    ],
)
def test_all_members_get_the_same_bits_and_send_what_the_closed_form_says(config, weights):
    everyone = reduced(config, weights)
    first, _ = everyone[0]
    for key, expected in by_hand(weights, config).items():
        own = cut(config)[key]
        if config is not FOUR_BITS or own.exact:
            np.testing.assert_allclose(first.gradient[key], expected, rtol=1e-6, atol=1e-6)
        else:
            twice = passed_on(config.second_codec(), own, expected.astype(np.float32))
            assert np.mean(~(np.abs(first.gradient[key] - np.asarray(twice)) <= 0.02)) < 0.02, (
                "codes at a border may flip"
            )
    reducer = NetworkReducer(config, cut(config), BUCKET)
    for rank, (result, link) in enumerate(everyone):
        for key, value in first.gradient.items():
            assert value.dtype == np.float32
            assert value.shape == (SIZES[key],)
            assert value.tobytes() == result.gradient[key].tobytes()
        assert link.bytes_sent == reducer.bytes_sent(len(weights), rank, weights[rank] > 0)


@pytest.mark.parametrize("config", [EXACTLY, FOUR_BITS])
def test_bits_do_not_depend_on_the_parts_and_a_member_without_part_sends_its_message_alone(config):
    weights = (2, 5, 1, 3)
    (equal, _), *_ = reduced(config, weights)
    everyone = reduced(config, weights, parts=(128, 100, 28, 0))
    for result, _ in everyone:
        assert {key: each.tobytes() for key, each in result.gradient.items()} == {
            key: each.tobytes() for key, each in equal.gradient.items()
        }
    message = sum(each.nbytes for each in messages_of(values_of(3), config).values())
    sent = [link.bytes_sent for _, link in everyone]
    assert sent[3] == message < sent[2] < sent[1] < sent[0]


def test_owners_have_their_parts_from_the_beginning():
    assert owners([1, 1, 1], 7) == [0, 1, 2, 0, 1, 2, 0]
    found = owners([128, 100, 28, 0], 64)
    for count in range(1, 65):
        for rank, part in enumerate((128, 100, 28, 0)):
            assert abs(found[:count].count(rank) - count * part / 256) < 2


def test_small_fragments_are_shared_among_all_members():
    rows = {f"{n}|0": rows_of(1000, EXACTLY, max_values=100) for n in range(10)}
    buckets = NetworkReducer(EXACTLY, rows).buckets(4)
    assert len(buckets) >= 4
    sizes = [len(bucket) for bucket in buckets]
    assert max(sizes) <= 26
    assert sum(sizes) == sum(each.count for each in rows.values())


def test_what_is_under_way_is_bounded():
    rows = {"long|0": rows_of(1 << 16, EXACTLY, max_values=256)}
    reducer = NetworkReducer(EXACTLY, rows, bucket_bytes=2048)
    message = {"long|0": np.asarray(EXACT.encode(rows["long|0"].to_rows(np.ones(1 << 16, np.float32))))}

    def member(link: ThreadLink) -> int:
        reducer.reduce(message, [1, 1, 1], link, timeout_seconds=20)
        return link.most_under_way

    assert len(reducer.buckets(3)) > 100
    for most in all_together(3, member):
        assert 0 < most <= 6 * (3 - 1) * 2


def test_what_was_sent_adds_up_to_what_went_in():
    """Of the second phase: sum of what was sent = sum of what went in - (e_K - e_0) / (1 - beta)."""
    config, beta = FOUR_BITS, FOUR_BITS.beta
    rounds, weights = 6, (1, 3)
    sent, went_in, errors = {}, {}, None
    for number in range(rounds):
        everyone = reduced(config, weights, errors, number)
        errors = [result.error for result, _ in everyone]
        for key, value in everyone[0][0].gradient.items():
            sent[key] = sent.get(key, 0) + value.astype(np.float64)
            went_in[key] = went_in.get(key, 0) + by_hand(weights, config, number)[key]
    assert all(error.steps == rounds for error in errors)
    kept = {}
    for error in errors:
        for place, stored in error.rows.items():
            assert place not in kept, "a row has one owner"
            kept[place] = np.asarray(load(stored))
    assert not [key for key, _ in kept if key == "gain|"]
    for key, rows in cut(config).items():
        if rows.exact:
            continue
        error = np.concatenate([kept[key, row] for row in range(rows.count)])[: rows.size]
        gap = np.abs(sent[key] + error / (1 - beta) - went_in[key]).max()
        lost = np.abs(sent[key] - went_in[key]).max()
        assert gap < 0.25 * lost, (key, gap, lost)  # the error itself is kept in 8 bits


def test_errors_are_forgotten_after_so_many_reduces():
    config = replace(FOUR_BITS, feedback=FeedbackConfig(reset_every=2))
    errors = fresh = None
    for _ in range(3):  # the third begins anew, with the same values
        everyone = reduced(config, (1, 1), errors)
        fresh = fresh or everyone
        errors = [result.error for result, _ in everyone]
    for key, value in fresh[0][0].gradient.items():
        np.testing.assert_array_equal(value, everyone[0][0].gradient[key])
    second = reduced(config, (1, 1), [result.error for result, _ in fresh])
    assert any(np.any(second[0][0].gradient[key] != value) for key, value in fresh[0][0].gradient.items())


class ChangedByte(ThreadLink):
    """Rank 1 sends the second phase's messages to rank 0 with one bit changed."""

    def send(self, peer, data, tag):
        if self.rank == 1 and peer == 0 and tag % 2:
            data = data.copy()
            data[0] ^= 1
        return super().send(peer, data, tag)


def test_a_changed_byte_would_be_seen():
    everyone = [result.gradient for result, _ in reduced(FOUR_BITS, (1, 1, 1), kind=ChangedByte)]
    same = [all(np.array_equal(one[key], everyone[2][key]) for key in one) for one in everyone]
    assert same == [False, True, True]


class Dead(ThreadLink):
    """Rank 1 sends nothing after its first message."""

    def send(self, peer, data, tag):
        if self.rank == 1 and self.bytes_sent:
            raise ConnectionError("dead")
        return super().send(peer, data, tag)


def test_a_member_that_dies_is_an_error_for_the_others_and_nobody_waits_for_ever():
    reducer = NetworkReducer(EXACTLY, cut(EXACTLY), BUCKET)

    def member(link: ThreadLink):
        with pytest.raises((ConnectionError, TimeoutError)) as found:
            reducer.reduce(messages_of(values_of(link.rank), EXACTLY), (1, 1, 1), link, timeout_seconds=0.3)
        return type(found.value)

    assert all_together(3, member, Dead) == [TimeoutError, ConnectionError, TimeoutError]


def test_without_any_weight_there_is_no_average():
    with pytest.raises(ValueError, match="nobody contributes"):
        reduced(EXACTLY, (0, 0))


def test_a_row_holds_whole_blocks():
    for size in (1, 63, 255, 256, 257, 1000, 1025):
        rows = rows_of(size, FOUR_BITS, max_values=256)
        assert rows.count * rows.row >= size > (rows.count - 1) * rows.row
        assert rows.count == 1 or rows.row % FOUR_BITS.block_size == 0
        values = np.arange(size, dtype=np.float32)
        np.testing.assert_array_equal(rows.from_rows(rows.to_rows(jax.numpy.asarray(values))), values)
