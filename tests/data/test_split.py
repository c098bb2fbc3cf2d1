import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gregale.data.examples import Windows, cut_of, end_cut, end_of, held_out_documents, split_at
from gregale.data.tokenizer_training import train_bpe
from gregale.data.tokenizers import BpeConfig, BytesTokenizer
from tests.data.conftest import in_memory

BYTES = BytesTokenizer()
SENTENCES = ["the wind, the sea, the gale ü ", "an island ", "north of the north "]
BPE = train_bpe(BpeConfig(vocabulary=290), iter(SENTENCES))


def numbered(lengths):
    """Documents of given lengths, in which every token, the ends too, is another number."""
    return in_memory(np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1]))


def tokens_of(stream, length):
    """All tokens in the windows of a stream, inputs and targets."""
    windows = Windows(stream, length, cross_documents=False)
    return {int(token) for n in range(len(windows)) for key in ("tokens", "targets") for token in windows[n][key]}


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=5), fraction=st.floats(0, 0.9), length=st.integers(1, 9)
)
def test_no_token_is_in_a_training_window_and_in_one_that_is_held_out(lengths, fraction, length):
    store = numbered(lengths)
    cut = end_cut(store, fraction, length)
    split = split_at(store, fraction, cut)
    train, held_out = (tokens_of(stream, length) for stream in split)
    assert not train & held_out
    assert len(split.train) + len(split.held_out) == sum(lengths)
    by_documents = split_at(store, fraction, None)
    enough = all(len(stream) > length for stream in by_documents)
    if fraction == 0 or enough:
        assert cut is None, "sources that have enough documents stay as they are"
    elif cut is None:
        assert sum(lengths) < 2 * length + 2, "one window each, that share no token"
    else:
        held = sum(lengths) - cut
        windows, rest = divmod(held - 1, length)
        assert rest == 0
        assert len(held_out) == held, "no held-out token is spent on less than a window"
        assert train
        assert max(train) < cut
        wanted = max(2, round(fraction * sum(lengths) / length))
        assert windows == wanted or (windows < wanted and cut - length <= length), (
            "the next would leave none to train on"
        )


def test_the_end_of_one_document():
    store = numbered([1000])
    assert not held_out_documents(1, 0.1).any()
    for fraction, length, held in (
        (0.1, 10, 10 * 10 + 1),
        (0.001, 10, 2 * 10 + 1),
        (0.1, 400, 400 + 1),  # two windows would leave none to train on
        (0.87, 100, 8 * 100 + 1),
        (0.1, 499, 500),
    ):
        assert end_cut(store, fraction, length) == 1000 - held
    assert end_cut(store, 0.1, 500) is None


@pytest.mark.parametrize("cut", [0, 1, 5, 31, 32, 40, 45, 56, 60])
@pytest.mark.parametrize("other", [BYTES, BPE])
def test_an_end_lies_where_it_was_in_the_text_for_another_tokenizer(other, cut):
    def encoded(tokenizer):
        return in_memory([[*tokenizer.encode(text), tokenizer.end_of_document] for text in SENTENCES])

    before, after = encoded(BYTES), encoded(other)
    end = end_of(before, cut, BYTES)
    place = cut_of(after, end, other)
    text = b"".join(other.vocabulary_bytes[token] for token in after.tokens[place:])
    expected = bytes(token for token in before.tokens[cut:] if token < 256)
    assert expected.endswith(text)
    assert len(expected) - len(text) < max(map(len, other.vocabulary_bytes)), "at most a token that straddles the cut"
    if other is BYTES:
        assert place == cut
