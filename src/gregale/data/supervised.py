"""The tokens that the loss is on, for a store in which it is not on all of them."""

import base64
import zlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class Supervised(NamedTuple):
    """A mask of consecutive tokens, by the indices at which it changes; before the first token it is false."""

    changes: np.ndarray  # ascending, int64 [change]

    @staticmethod
    def joined(masks: Iterable[np.ndarray]) -> "Supervised":
        """Return consecutive masks, bool [token] each."""
        found, first = [np.zeros(0, np.int64)], 0
        for mask in masks:
            found.append(np.flatnonzero(np.diff(mask, prepend=False, append=False)) + first)
            first += len(mask)
        return Supervised(np.concatenate(found))

    def at(self, indices: np.ndarray) -> np.ndarray:
        """Return the mask at some indices, bool [index]."""
        return np.searchsorted(self.changes, indices, side="right") % 2 == 1

    def before(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of tokens with loss before some indices, int64 [index]."""
        signed = np.append(0, (self.changes * (1 - 2 * (np.arange(len(self.changes)) % 2 == 0))).cumsum())
        at = np.searchsorted(self.changes, indices)
        return signed[at] + indices * (at % 2)

    def packed(self) -> str:
        """Return the mask as a short text."""
        return base64.b64encode(zlib.compress(np.diff(self.changes, prepend=0).astype("<i8").tobytes())).decode("ascii")

    @staticmethod
    def unpacked(text: str) -> np.ndarray:
        """Return the changes of the mask that `packed` encoded."""
        return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i8").cumsum()
