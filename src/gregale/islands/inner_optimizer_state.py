"""An island's inner optimizer in host memory, for an island that joins and has none of its own.

Its moments and counters are those of the peer that shows them: the learning rate of a joiner is where the fleet's is,
and its first steps are not those of an optimizer that knows nothing yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from gregale.communication.shards import keys_here, on_devices, shards_here
from gregale.methods.method import PsdpState

Tree = Any
Expected = dict[str, tuple[tuple[int, ...], np.dtype]]


class InnerOptimizerState(NamedTuple):
    """A peer's inner optimizer, by the key of the shard, after so many steps of its own."""

    step: int
    arrays: dict[str, np.ndarray]


def on_host(state: PsdpState) -> dict[str, np.ndarray]:
    """This host's shards of a state's optimizer, by key; waits for the device."""
    found = {}
    for path, array in _arrays(state).items():
        found |= {key: np.array(shard) for key, shard in shards_here(path, array).items()}
    return found


def expected(state: PsdpState) -> Expected:
    """Shape and type of what `on_host` gives."""
    found = {}
    for path, array in _arrays(state).items():
        place = array.sharding
        assert isinstance(place, NamedSharding)
        shard = place.shard_shape(array.shape)
        found |= {key: (shard, np.dtype(array.dtype)) for key in keys_here(path, array.shape, place)}
    return found


def taken_over(state: PsdpState, arrays: Mapping[str, np.ndarray]) -> PsdpState:
    """The state with the optimizer that `arrays` are the shards of; its parameters stay."""
    own = _arrays(state)
    places = {path: array.sharding for path, array in own.items()}
    new = [on_devices(arrays, path, own[path].shape, place) for path, place in places.items()]  # pyright: ignore
    sharded, gathered = jax.tree.unflatten(jax.tree.structure((state.sharded, state.gathered)), new)
    return state._replace(sharded=sharded, gathered=gathered)


def _arrays(state: PsdpState) -> dict[str, jax.Array]:
    """The optimizer's arrays by their path, in the order of its leaves."""
    leaves = jax.tree_util.tree_flatten_with_path((state.sharded, state.gathered))[0]
    return {f"inner/{jax.tree_util.keystr(path, simple=True, separator='.')}": array for path, array in leaves}
