import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from gregale.evaluation.bigram import bigram_bits_per_byte
from tests.data.conftest import stream_of

VOCABULARY = 10
END = 9
BYTES = np.array([1, 1, 2, 1, 3, 1, 1, 1, 1, 0])
RANDOM = np.random.default_rng(0)
TRAINING = [RANDOM.integers(0, 9, length).tolist() for length in (40, 3, 25, 60)]
HELD_OUT = [RANDOM.integers(0, 9, length).tolist() for length in (7, 30)]


def pairs_of(documents, cross):
    ended = [[*document, END] for document in documents]
    rows = [[token for document in ended for token in document]] if cross else ended
    return [pair for row in rows for pair in pairwise(row)]


def slow_bits_per_byte(training, held_out, cross):
    """The docstring's equation, one pair at a time."""
    pairs = Counter(pairs_of(training, cross))
    best = math.inf
    for strength in [2.0**power for power in range(-4, 17)]:
        bits = 0.0
        for first, second in pairs_of(held_out, cross):
            context = sum(count for (a, _), count in pairs.items() if a == first)
            target = sum(count for (_, b), count in pairs.items() if b == second)
            unigram = (target + 1) / (sum(pairs.values()) + VOCABULARY)
            bits -= math.log2((pairs[first, second] + strength * unigram) / (context + strength))
        best = min(best, bits)
    return best / sum(int(BYTES[second]) for _, second in pairs_of(held_out, cross))


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("block", [1 << 22, 7])
def test_it_follows_the_slow_oracle(make_store, monkeypatch, cross, block):
    monkeypatch.setattr("gregale.evaluation.bigram.READ_TOKENS", block)
    training, held_out = stream_of(make_store(TRAINING)), stream_of(make_store(HELD_OUT))
    found = bigram_bits_per_byte([training], [held_out], BYTES, cross)
    assert found == pytest.approx(slow_bits_per_byte(TRAINING, HELD_OUT, cross), rel=1e-12)


def test_several_streams_count_as_one(make_store):
    one = bigram_bits_per_byte([stream_of(make_store(TRAINING))], [stream_of(make_store(HELD_OUT))], BYTES)
    parts = [stream_of(make_store([document])) for document in TRAINING]
    held_out = [stream_of(make_store([document])) for document in HELD_OUT]
    assert bigram_bits_per_byte(parts, held_out, BYTES) == pytest.approx(one, rel=1e-12)


def test_a_text_that_repeats_itself_is_learnt(make_store):
    stream = stream_of(make_store([[1, 2, 3] * 2000]))
    assert bigram_bits_per_byte([stream], [stream], np.ones(VOCABULARY)) < 0.01
