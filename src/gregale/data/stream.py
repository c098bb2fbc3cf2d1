"""Documents of a store, one after the other, as one long stream of tokens."""

import numpy as np

from gregale.data.store import TokenStore


class DocumentStream:
    """Some documents of a store, or what lies of them between two places, concatenated in order.

    Args:
        store: where the tokens lie; nothing is copied.
        chosen: bool [document], which documents the stream has.
        start: the first of the store's tokens that the stream may have.
        stop: where those end; the end of the store if not given.

    Attributes:
        starts: int64 [chosen document + 1], where each document begins in the stream, and the end of the last.
    """

    def __init__(self, store: TokenStore, chosen: np.ndarray, start: int = 0, stop: int | None = None):
        offsets = store.offsets.clip(start, stop)
        numbers = np.flatnonzero(chosen & (np.diff(offsets) > 0))
        lengths = offsets[numbers + 1] - offsets[numbers]
        self.starts = np.concatenate([[0], lengths]).cumsum(dtype=np.int64)
        self._shifts = offsets[numbers] - self.starts[:-1]  # from place in the stream to place in the store
        self._tokens, self._corrections = store.tokens, store.corrections

    def __len__(self) -> int:
        """Tokens in the stream, end-of-document tokens included."""
        return int(self.starts[-1])

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens from `start` to `stop`, int32 [token], and the number of each one's document, int64 [token]."""
        places, documents = self._places(start, stop)
        return self._tokens[places].astype(np.int32), documents

    def more_bytes(self, start: int, stop: int) -> np.ndarray:
        """How many bytes of text the tokens from `start` to `stop` stand for beyond their pieces, int64 [token]."""
        return self._corrections.at(self._places(start, stop)[0])

    def _places(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the store has tokens of the stream, and the number of each one's document."""
        first = np.searchsorted(self.starts, start, side="right") - 1
        last = np.searchsorted(self.starts, stop, side="left")
        counts = np.diff(self.starts[first : last + 1].clip(start, stop))
        documents = np.repeat(np.arange(first, last), counts)
        return np.arange(start, stop) + self._shifts[documents], documents


def held_out_documents(count: int, fraction: float) -> np.ndarray:
    """Return which of a source's documents are held out, bool [document].

    A document is held out when a hash of its number (splitmix64) lies in the lowest `fraction` of all 64-bit numbers.
    So the choice is the same on every machine and for every tokenizer, and documents added at the end of a source
    leave those before them where they were.
    """
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed.astype(np.float64) < fraction * 2.0**64
