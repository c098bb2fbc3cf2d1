import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gregale.data.examples import Windows, held_out_examples, make_example, training_examples
from tests.data.conftest import numbered, stream_of

LENGTH = 4
KEYS = {"tokens", "targets", "loss_mask", "segment_ids", "positions"}


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


def test_windows_overlap_by_one_token_leave_the_rest_and_may_cross_documents(make_store):
    stream = stream_of(make_store([[1, 2, 3], [4, 5, 6, 7, 8]]))
    windows, crossing = (Windows(stream, LENGTH, cross_documents=cross) for cross in (False, True))
    assert len(windows) == 2  # 10 tokens with both ends: (10 - 1) // 4
    assert windows[0]["tokens"].tolist() == [1, 2, 3, 9]
    assert windows[0]["targets"].tolist() == [2, 3, 9, 4]
    assert windows[0]["loss_mask"].tolist() == [1, 1, 1, 0]
    assert windows[1]["tokens"].tolist() == [4, 5, 6, 7]
    assert windows[1]["segment_ids"].tolist() == [0, 0, 0, 0]
    assert crossing[0]["loss_mask"].tolist() == [1, 1, 1, 1]
    assert crossing[0]["positions"].tolist() == [0, 1, 2, 3]


def first_tokens(examples, indices):
    return [int(examples[index]["tokens"][0]) for index in indices]


def test_every_epoch_has_every_window_once_in_an_order_that_index_and_seed_alone_decide():
    windows = {"a": numbered(50, 0)}
    make = lambda seed: training_examples(windows, {"a": 1.0}, seed)  # noqa: E731
    assert make(3).endless
    assert len(make(3)) == sys.maxsize
    drawn = {seed: first_tokens(make(seed), range(100)) for seed in (0, 1, 3)}
    assert first_tokens(make(1), reversed(range(100))) == drawn[1][::-1]
    epochs = [tuple(tokens[first : first + 50]) for tokens in drawn.values() for first in (0, 50)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({*epochs, tuple(range(50))}) == 7, "neighbouring seeds share no epoch, and none is in order"
    assert first_tokens(make(None), range(60)) == [*range(50), *range(10)]


@pytest.mark.parametrize("weights", [(1.0, 3.0), (0.1, 0.3), (2.0, 1.0), (1.0, 1.25)])
def test_mixtures_have_their_weights_all_along_and_each_source_its_own_epochs(weights):
    windows = {"a": numbered(7, 0), "b": numbered(31, 100)}
    examples = training_examples(windows, dict(zip("ab", weights, strict=True)), seed=0)
    drawn = first_tokens(examples, range(200))
    found = np.cumsum(np.array(drawn) < 100)
    assert np.abs(found - weights[0] / sum(weights) * np.arange(1, 201)).max() <= 1
    for first, size in ((0, 7), (100, 31)):
        own = [token for token in drawn if (token < 100) == (first == 0)]
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : epoch * size + size]) == list(range(first, first + size))


def test_held_out_examples_are_all_windows_once_then_blank():
    windows = {"a": numbered(3, 0), "b": numbered(2, 100)}
    rows = {name: Windows(own.stream, LENGTH, False, evaluates=True) for name, own in windows.items()}
    examples = held_out_examples(rows)
    assert not examples.endless
    assert first_tokens(examples, range(len(examples))) == [0, 1, 2, 100, 101]
    rows = examples.rows([4, 5, 6])
    assert {key: array.shape for key, array in rows.items()} == dict.fromkeys(KEYS | {"more_bytes"}, (3, LENGTH))
    assert examples.rows([5]).keys() == rows.keys()
    assert rows["loss_mask"].sum(axis=1).tolist() == [LENGTH, 0, 0]
    for index in (5, -1):
        with pytest.raises(IndexError):
            examples[index]
