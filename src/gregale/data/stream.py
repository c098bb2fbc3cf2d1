"""The documents of a store as one long stream of tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gregale.data.store import TokenStore
from gregale.data.supervised import Supervised
from gregale.data.text_bytes import Corrections
from gregale.data.tokenizers import Tokenizer


class InMemory(NamedTuple):
    """Tokens of documents in memory, as a `TokenStore` has them in files."""

    tokens: np.ndarray
    offsets: np.ndarray
    corrections: Corrections
    supervised: Supervised | None = None


class DocumentStream:
    """Selected documents of a store, optionally only their tokens between two indices, concatenated in order.

    - `store`: holds the tokens; nothing is copied.
    - `chosen`: bool [document], whether the stream has a document.
    - `start`: the first of the store's tokens that the stream may have.
    - `stop`: the end of those tokens; by default the end of the store.

    - `starts`: int64 [chosen document + 1], the index of each document in the stream, and the end of the last.
    - `numbers`: int64 [chosen document], the index of each document in the store.
    """

    def __init__(self, store: TokenStore | InMemory, chosen: np.ndarray, start: int = 0, stop: int | None = None):
        offsets = store.offsets.clip(start, stop)
        self.numbers = numbers = np.flatnonzero(chosen & (np.diff(offsets) > 0))
        lengths = offsets[numbers + 1] - offsets[numbers]
        self.starts = np.concatenate([[0], lengths]).cumsum(dtype=np.int64)
        self._shifts = offsets[numbers] - self.starts[:-1]  # from index in the stream to index in the store
        self._tokens, self._corrections, self._supervised = store.tokens, store.corrections, store.supervised

    def __len__(self) -> int:
        """Return the number of tokens in the stream, end-of-document tokens included."""
        return int(self.starts[-1])

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens from `start` to `stop`, int32 [token], and each one's document index, int64 [token]."""
        indices, documents = self._indices(start, stop)
        return self._tokens[indices].astype(np.int32), documents

    def more_bytes(self, start: int, stop: int) -> np.ndarray:
        """Return the bytes of text of each token beyond its vocabulary entry, int64 [token]."""
        return self._corrections.at(self._indices(start, stop)[0])

    @property
    def has_masks(self) -> bool:
        """Return whether the loss is on some of the tokens only."""
        return self._supervised is not None

    def supervised(self, start: int, stop: int) -> np.ndarray:
        """Return whether the loss is on each token, bool [token]."""
        if self._supervised is None:
            return np.ones(stop - start, bool)
        return self._supervised.at(self._indices(start, stop)[0])

    def tokens_at(self, places: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """Return the tokens at some indices of the stream, which are in these documents, int32 [index]."""
        return self._tokens[places + self._shifts[documents]].astype(np.int32)

    def more_bytes_at(self, places: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """Return `more_bytes` at some indices of the stream, which are in these documents, int64 [index]."""
        return self._corrections.at(places + self._shifts[documents])

    def supervised_at(self, places: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """Return `supervised` at some indices of the stream, which are in these documents, bool [index]."""
        if self._supervised is None:
            return np.ones(len(places), bool)
        return self._supervised.at(places + self._shifts[documents])

    def supervised_in(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Return the number of tokens with loss between two indices in each document, int64 [document]."""
        if self._supervised is None:
            return stops - starts
        return self._supervised.before(stops + self._shifts) - self._supervised.before(starts + self._shifts)

    def _indices(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return each token's index in the store, and the index of its document."""
        first = np.searchsorted(self.starts, start, side="right") - 1
        last = np.searchsorted(self.starts, stop, side="left")
        counts = np.diff(self.starts[first : last + 1].clip(start, stop))
        documents = np.repeat(np.arange(first, last), counts)
        return np.arange(start, stop) + self._shifts[documents], documents


def stream_of(texts: Sequence[str], tokenizer: Tokenizer) -> DocumentStream:
    """Return the stream of texts in memory, at least one, each a document with the token that ends it."""
    found = [
        (np.append(ids, tokenizer.end_of_document), np.append(more, 0)) for ids, more in tokenizer.encode_counted(texts)
    ]
    tokens, more = (np.concatenate(parts) for parts in zip(*found, strict=True))
    offsets = np.array([0, *(len(ids) for ids, _ in found)], np.int64).cumsum()
    return DocumentStream(InMemory(tokens, offsets, Corrections.of(more)), np.ones(len(texts), bool))


def held_out_documents(count: int, fraction: float) -> np.ndarray:
    """Return whether each document of a source is held out, bool [document].

    A document is held out when a hash of its number (splitmix64) lies in the lowest `fraction` of all 64-bit numbers.
    So the choice is the same on every machine and for every tokenizer. Documents added at the end of a source do not
    change the choice for earlier documents.
    """
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed.astype(np.float64) < fraction * 2.0**64
