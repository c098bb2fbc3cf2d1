"""Documents longer than a window, scored in sliding windows."""

from collections.abc import Sequence

import numpy as np

from gregale.data.stream import DocumentStream
from gregale.evaluation.tasks.continuations import Continuation

READ_TOKENS = 1 << 20


class SlidingWindows:
    """Documents as continuations: each token is scored once, with as many tokens before it as its window has.

    The first window of a document scores its first tokens. Each later window ends `stride` tokens further, or at the
    document's end, and scores the tokens that the earlier ones did not. Each has `length` input tokens, so from the
    second window on every scored token has at least length - stride + 1 tokens before it. A stride of `length` computes
    least; lm-evaluation-harness uses it. The token that ends a document is not scored.

    - `streams`: of documents.
    - `length`: L, input tokens of a window.
    - `stride`: tokens that a window scores, from 1 to L.
    - `start`: tokens before the first of every document; at least one, and not scored.
    - `end`: the token that ends a document in a stream.

    - `documents`: the index of each window's document, int64 [window].
    - `sizes`: scored tokens of each document, int64 [document].
    """

    def __init__(self, streams: Sequence[DocumentStream], length: int, stride: int, start: Sequence[int], end: int):
        self._streams = streams
        self._start = np.array(start, np.int32)
        self._length = length
        begins = [each.starts[:-1] for each in self._streams]
        sizes = [sizes_without_end(each, end) for each in self._streams]
        self._begins, self.sizes = np.concatenate(begins), np.concatenate(sizes)
        self._firsts = np.array([0, *map(len, begins)]).cumsum()  # the first document of each stream
        room = length - len(self._start) + 1  # tokens that the first window scores
        more = -(-np.maximum(self.sizes - room, 0) // stride)
        counts = np.where(self.sizes > 0, 1 + more, 0)
        self.documents = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(self.documents)) - np.repeat(counts.cumsum() - counts, counts)
        sizes = self.sizes[self.documents]
        self._ends = np.minimum(room + number * stride, sizes)
        before = np.where(number > 0, np.minimum(room + (number - 1) * stride, sizes), 0)
        self._scored = self._ends - before

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def lengths(self) -> np.ndarray:
        """Return the input tokens of each window, int64 [window]."""
        return np.minimum(self._ends + len(self._start) - 1, self._length)

    def __getitem__(self, index: int) -> Continuation:
        document, end = self.documents[index], int(self._ends[index])
        stream = int(np.searchsorted(self._firsts, document, side="right")) - 1
        first = end - self._length - 1  # of the window; below 0 if it includes tokens of the start
        begin = int(self._begins[document])
        tokens, _ = self._streams[stream].read(begin + max(first, 0), begin + end)
        before = self._start[max(len(self._start) + first, 0) :] if first < 0 else self._start[:0]
        return Continuation(np.concatenate([before, tokens]), int(self._scored[index]))

    def text_bytes(self, token_bytes: np.ndarray) -> np.ndarray:
        """Return the bytes of each document's text, [document]; `token_bytes`: see `Tokenizer.token_bytes`."""
        found = []
        for stream in self._streams:
            total = np.zeros(len(stream.starts) - 1)
            for first in range(0, len(stream), READ_TOKENS):
                stop = min(first + READ_TOKENS, len(stream))
                tokens, documents = stream.read(first, stop)
                total += np.bincount(documents, token_bytes[tokens] + stream.more_bytes(first, stop), len(total))
            found.append(total)
        return np.concatenate(found)


def sizes_without_end(stream: DocumentStream, end: int) -> np.ndarray:
    """Return each document's tokens without the end token, which only a truncated last document lacks."""
    sizes = np.diff(stream.starts) - 1
    if len(sizes) and stream.read(len(stream) - 1, len(stream))[0][0] != end:
        sizes[-1] += 1
    return sizes
