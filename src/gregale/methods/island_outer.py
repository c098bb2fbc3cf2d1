"""The outer side of an island in host memory: theta, the outer optimizer, and their exchange with devices and peers.

`methods/island.py` shows a whole round. Every array belongs to one fragment and one shard, and has a name:

    {fragment}/theta/{path}|{place of the shard along each axis}
    {fragment}/optimizer/{path in the state}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from gregale.communication.network import NetworkReducer
from gregale.methods.island import Island

Tree = Any
Allocate = Callable[[str, tuple[int, ...], np.dtype], np.ndarray]
"""allocate(name, shape, dtype): memory for an array. It is written once, here; arrays of JAX may look into it until the
last reference is gone, so free it then and never write it again. The same name comes again with each new version."""


class Held(NamedTuple):
    """An array that peers may ask for."""

    array: np.ndarray
    version: int  # the round of its fragment's last change


class Prepared(NamedTuple):
    """A fragment after its outer step, not taken over yet."""

    index: int  # of the fragment
    arrays: dict[str, np.ndarray]  # by name
    fragment_digest: bytes
    digest: str  # of the whole outer side, if this is committed
    finite: bool  # whether theta is; committing infinities or NaN would spoil every island


class HostOuter:
    """theta and the outer optimizer's state of this host's shards, by fragment, as NumPy arrays.

    Nothing is changed in place: `prepare` makes new arrays, `commit` takes them over.
    One thread calls `prepare`, `commit` and `load`; others may read meanwhile.
    """

    def __init__(self, island: Island, allocate: Allocate | None = None): ...

    def begin(self, parameters: Tree) -> None:
        """The outer side before the first round, from the island's parameters; version 0."""

    def theta(self, index: int) -> Tree:
        """theta of a fragment on the island's devices under `opt_state`, for `Island.depart` and `Island.arrive`."""

    def reducer(self, index: int) -> NetworkReducer:
        """The reducer of a fragment's messages."""
        raise NotImplementedError

    def prepare(self, index: int, gradient: Mapping[str, np.ndarray]) -> Prepared:
        """The outer step on a fragment with the gradient of `NetworkReducer.reduce`; nothing is changed yet."""
        raise NotImplementedError

    def commit(self, prepared: Prepared, version: int) -> None:
        """Takes a prepared fragment over; `version`: the number of the round, from 1."""

    @property
    def digest(self) -> str:
        """Of all arrays: equal on islands whose outer sides are equal to the last bit."""
        raise NotImplementedError

    def leaves(self) -> dict[str, Held]:
        """Every array with its version, by name: what peers that heal, and checkpoints, read."""
        raise NotImplementedError

    def expected(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Type and shape of every array by name, from the configuration alone: to check what a peer offers."""
        raise NotImplementedError

    def load(self, arrays: Mapping[str, np.ndarray], versions: Mapping[str, int]) -> None:
        """Takes over arrays of a peer or a checkpoint, checked against `expected`; those not given stay."""
