"""A joiner's side of healing: fetches a state from peers, in pieces, each with its hash, from all of them at once.

fetched = fetch(sources, token, expected={"wte|0": ((1000, 64), np.dtype("float32"))}, held=own_arrays,
                timeout_seconds=60.0, allocate=shm.empty, progress=lambda received, total: None)
fetched.generation, fetched.round, fetched.arrays, fetched.versions, fetched.facts, fetched.received_bytes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Expected = Mapping[str, tuple[tuple[int, ...], np.dtype]]


class TransferFailed(Exception):
    """No source had all of the state, or not in time: one line with what each of them did."""


@dataclass(frozen=True)
class Fetched:
    """A whole state of one round."""

    generation: int
    round: int
    arrays: dict[str, np.ndarray]
    versions: dict[str, int]
    facts: dict
    received_bytes: int


def fetch(
    sources: Sequence[str],
    token: bytes,
    expected: Expected,
    timeout_seconds: float,
    held: Mapping[str, np.ndarray] | None = None,
    allocate: Callable[[tuple[int, ...], np.dtype], np.ndarray] = np.empty,
    progress: Callable[[int, int], None] = lambda received, total: None,
) -> Fetched:
    """The newest state that the sources have.

    - `expected`: shape and dtype of every array; a manifest that asks for anything else is refused before a byte is
      allocated
    - `held`: arrays that are here already, also from an interrupted fetch: those with the right hash are kept
    - `progress`: called with (bytes here, bytes in all) after each piece

    A source that dies, stalls, is corrupt or is cut short is replaced by the others. Raises TransferFailed.
    """
    raise NotImplementedError
