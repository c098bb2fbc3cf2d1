import threading
from contextlib import closing
from itertools import islice

import numpy as np
import pytest

from gregale.data.examples import Windows, held_out_examples, training_examples
from gregale.programs.runtime.batches import batches
from tests.data.conftest import stream_of

BATCH = 8


@pytest.fixture
def stream(make_store):
    store = make_store([[*range(1, 1 + length)] for length in range(3, 60)])
    return stream_of(store)


@pytest.fixture
def examples(stream):
    return training_examples({"a": Windows(stream, 16, False)}, {"a": 1.0}, seed=0)


def take(examples, count, size=BATCH, **options):
    with closing(batches(examples, size, **options)) as steps:
        return list(islice(steps, count))


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[key], other[key]) for key in one)


def test_resuming_takes_the_example_alone_also_with_batches_of_another_size(examples):
    for first, size in ((0, BATCH), (BATCH, BATCH), (17 * BATCH, BATCH), (BATCH * 10**9, BATCH), (3 * BATCH, 5)):
        expected = [examples.rows(range(row, row + size)) for row in range(first, first + 5 * size, size)]
        assert_equal(take(examples, 5, size, first=first), expected)


@pytest.mark.parametrize("hosts", [[range(8)], [range(4), range(4, 8)], [[0, 2, 5], [7], [1, 3, 4, 6]]])
def test_the_batch_is_the_same_however_hosts_share_it(examples, hosts):
    shares = [take(examples, 6, rows=rows, first=3 * BATCH) for rows in hosts]
    order = np.argsort([row for rows in hosts for row in rows])
    joined = [
        {key: np.concatenate([share[key] for share in step])[order] for key in step[0]}
        for step in zip(*shares, strict=True)
    ]
    assert_equal(joined, take(examples, 6, first=3 * BATCH))


def test_a_finite_set_ends_with_blank_rows(stream):
    examples = held_out_examples({"a": Windows(stream, 16, False)})
    found = take(examples, None)
    assert len(found) == -(-len(examples) // BATCH)
    tokens = np.concatenate([step["tokens"] for step in found])
    np.testing.assert_array_equal(tokens[: len(examples)], examples.rows(range(len(examples)))["tokens"])
    assert len(examples) % BATCH
    assert found[-1]["loss_mask"][len(examples) % BATCH :].sum() == 0


def test_closing_ends_the_threads(examples):
    before = set(threading.enumerate())
    steps = batches(examples, BATCH)
    next(steps)
    own = set(threading.enumerate()) - before
    assert own
    steps.close()
    for thread in own:
        thread.join()  # hangs if the thread goes on
    with pytest.raises(ValueError, match="closed"):
        next(steps)
