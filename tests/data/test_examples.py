import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gregale.data.examples import Windows, held_out_examples, make_example, training_examples
from tests.data.conftest import stream_of

LENGTH = 4
KEYS = {"tokens", "targets", "loss_mask", "segment_ids", "positions"}


def numbered(make_store, count, first):
    """A stream of `count` windows, window w beginning with token first + w."""
    tokens = [first + place // LENGTH for place in range(count * LENGTH)]
    return stream_of(make_store([tokens]))


def slow_example(tokens, documents):
    """The rules of `make_example`, one token at a time."""
    rows = {key: [] for key in KEYS}
    segment, position = 0, 0
    for place in range(len(tokens) - 1):
        if place and documents[place] != documents[place - 1]:
            segment, position = segment + 1, 0
        rows["tokens"].append(tokens[place])
        rows["targets"].append(tokens[place + 1])
        rows["loss_mask"].append(1.0 if documents[place] == documents[place + 1] else 0.0)
        rows["segment_ids"].append(segment)
        rows["positions"].append(position)
        position += 1
    return rows


@given(st.lists(st.integers(1, 5), min_size=2, max_size=8))
def test_an_example_follows_the_slow_oracle(lengths):
    documents = np.repeat(np.arange(7, 7 + len(lengths)), lengths)
    tokens = np.arange(100, 100 + len(documents), dtype=np.int32)
    example = make_example(tokens, documents)
    expected = slow_example(tokens.tolist(), documents.tolist())
    assert {key: array.tolist() for key, array in example.items()} == expected
    assert {key: array.dtype for key, array in example.items()} == {
        key: np.float32 if key == "loss_mask" else np.int32 for key in KEYS
    }


def test_windows_overlap_by_one_token_and_leave_the_rest(make_store):
    windows = Windows([stream_of(make_store([[1, 2, 3], [4, 5, 6, 7, 8]]))], LENGTH, cross_documents=False)
    assert len(windows) == 2  # 10 tokens with both ends: (10 - 1) // 4
    assert windows[0]["tokens"].tolist() == [1, 2, 3, 9]
    assert windows[0]["targets"].tolist() == [2, 3, 9, 4]
    assert windows[0]["loss_mask"].tolist() == [1, 1, 1, 0]
    assert windows[1]["tokens"].tolist() == [4, 5, 6, 7]
    assert windows[1]["segment_ids"].tolist() == [0, 0, 0, 0]


def test_crossing_documents_makes_one_of_them(make_store):
    windows = Windows([stream_of(make_store([[1, 2], [4, 5, 6]]))], LENGTH, cross_documents=True)
    assert windows[0]["loss_mask"].tolist() == [1, 1, 1, 1]
    assert windows[0]["segment_ids"].tolist() == [0, 0, 0, 0]
    assert windows[0]["positions"].tolist() == [0, 1, 2, 3]


def first_tokens(examples, indices):
    return [int(examples[index]["tokens"][0]) for index in indices]


def test_every_epoch_has_every_window_once_in_another_order(make_store):
    windows = Windows([numbered(make_store, 50, 0)], LENGTH, False)
    examples = training_examples({"a": windows}, {"a": 1.0}, seed=3)
    assert examples.endless
    assert len(examples) == sys.maxsize
    epochs = [first_tokens(examples, range(50 * epoch, 50 * epoch + 50)) for epoch in range(4)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4
    assert list(range(50)) not in epochs


def test_examples_depend_on_index_and_seed_alone(make_store):
    windows = {name: Windows([numbered(make_store, 20, 0)], LENGTH, False) for name in "ab"}
    make = lambda seed: training_examples(windows, {"a": 1.0, "b": 2.0}, seed)  # noqa: E731
    forward = first_tokens(make(1), range(100))
    assert first_tokens(make(1), reversed(range(100))) == forward[::-1]
    assert first_tokens(make(2), range(100)) != forward


def test_neighbouring_seeds_do_not_share_shifted_epochs(make_store):
    windows = Windows([numbered(make_store, 50, 0)], LENGTH, False)
    second_epoch = first_tokens(training_examples({"a": windows}, {"a": 1.0}, 0), range(50, 100))
    assert second_epoch != first_tokens(training_examples({"a": windows}, {"a": 1.0}, 1), range(50))


def test_without_a_seed_windows_come_in_order(make_store):
    windows = Windows([numbered(make_store, 5, 0)], LENGTH, False)
    examples = training_examples({"a": windows}, {"a": 1.0}, seed=None)
    assert first_tokens(examples, range(12)) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


@pytest.mark.parametrize("weights", [(1.0, 3.0), (0.1, 0.3), (2.0, 1.0), (1.0, 1.25)])
def test_mixtures_have_their_weights_all_along_and_each_source_its_own_epochs(make_store, weights):
    sizes = {"a": 7, "b": 31}
    windows = {"a": Windows([numbered(make_store, 7, 0)], LENGTH, False)}
    windows["b"] = Windows([numbered(make_store, 31, 100)], LENGTH, False)
    examples = training_examples(windows, dict(zip("ab", weights, strict=True)), seed=0)
    drawn = first_tokens(examples, range(450))
    found = np.cumsum(np.array(drawn) < 100)
    assert np.abs(found - weights[0] / sum(weights) * np.arange(1, 451)).max() <= 1
    for name, first in (("a", 0), ("b", 100)):
        own = [token for token in drawn if (token < 100) == (name == "a")]
        size = sizes[name]
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : epoch * size + size]) == list(range(first, first + size))


def test_held_out_examples_are_all_windows_once_then_blank(make_store):
    streams = {"a": numbered(make_store, 3, 0), "b": numbered(make_store, 2, 100)}
    examples = held_out_examples(streams, LENGTH, False)
    assert not examples.endless
    assert first_tokens(examples, range(len(examples))) == [0, 1, 2, 100, 101]
    rows = examples.rows([4, 5, 6])
    assert {key: array.shape for key, array in rows.items()} == dict.fromkeys(KEYS | {"more_bytes"}, (3, LENGTH))
    assert examples.rows([5]).keys() == rows.keys()
    assert rows["loss_mask"].sum(axis=1).tolist() == [LENGTH, 0, 0]
    for index in (5, -1):
        with pytest.raises(IndexError):
            examples[index]


def test_every_held_out_token_but_the_first_is_a_target_once(make_store):
    stream = stream_of(make_store([[token] for token in range(8)]))
    examples = held_out_examples({"x": stream}, 5, True)
    targets = examples.rows(range(len(examples)))["targets"].ravel()
    assert Counter(targets.tolist()) == Counter([*range(1, 8), *[9] * 8])
