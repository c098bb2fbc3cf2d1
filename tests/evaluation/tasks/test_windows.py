"""Sliding windows score each token once, and give it what they can."""

from dataclasses import dataclass

import numpy as np
import pytest

from gregale.data.examples import DocumentStream
from gregale.data.tokenizers import NONE, ByteCountOverrides
from gregale.programs.runtime.evaluation import SlidingWindows

END, START = 256, 300


@dataclass
class Store:
    tokens: np.ndarray
    offsets: np.ndarray
    corrections: ByteCountOverrides = NONE
    supervised: None = None


def stream_of(*sizes: int, cut: int = 0) -> DocumentStream:
    """Documents whose tokens are their places; `cut`: tokens that are missing at the end."""
    offsets = np.concatenate([[0], np.array(sizes) + 1]).cumsum()
    tokens = np.arange(offsets[-1])
    tokens[offsets[1:] - 1] = END
    return DocumentStream(Store(tokens, offsets), np.ones(len(sizes), bool), stop=int(offsets[-1]) - cut)


@pytest.mark.parametrize(("length", "stride"), [(8, 8), (8, 3), (8, 1), (64, 16)])
@pytest.mark.parametrize("start", [(START,), (START, START + 1)])
def test_each_token_once_after_as_many_as_a_window_has(length, stride, start):
    windows = SlidingWindows([stream_of(4, 0, 33, 8), stream_of(9), stream_of(21, cut=3)], length, stride, start, END)
    assert windows.sizes.tolist() == [4, 0, 33, 8, 9, 19]
    texts: dict[int, list[int]] = {}
    for number, document in enumerate(windows.documents.tolist()):
        tokens, scored = windows[number]
        assert len(tokens) - 1 == windows.lengths[number] <= length
        before = [*start, *texts.setdefault(document, [])]
        given, own = tokens[:-scored].tolist(), tokens[-scored:].tolist()
        assert given == before[-len(given) :], "what stands before is the document's"
        if len(given) < len(before):
            assert len(tokens) == length + 1, "nothing is left out that the window has room for"
            assert len(given) >= length - stride + 1
        texts[document] += own
    assert [len(texts.get(number, [])) for number in range(6)] == windows.sizes.tolist()
    assert texts[2] == list(range(6, 39))
    assert 1 not in texts


def test_a_stride_of_the_whole_window_is_that_of_lm_evaluation_harness():
    windows = SlidingWindows([stream_of(10)], 4, 4, (START,), END)
    found = [(windows[i].tokens.tolist(), windows[i].scored) for i in range(len(windows))]
    assert found == [([START, 0, 1, 2, 3], 4), ([3, 4, 5, 6, 7], 4), ([5, 6, 7, 8, 9], 2)]


def test_bytes_of_documents():
    windows = SlidingWindows([stream_of(2, 0, 3), stream_of(1)], 4, 4, (START,), END)
    values = np.ones(END + 1, np.int32)
    values[END] = 0
    assert windows.text_bytes(values).tolist() == windows.sizes.tolist() == [2, 0, 3, 1]
