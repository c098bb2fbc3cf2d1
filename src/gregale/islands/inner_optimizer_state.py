"""The inner optimizer and the buffers of an island in host memory, for a joining island that has none.

The joiner takes them from a peer. So its learning rate is that of the fleet, and its first steps do
not come from an optimizer with empty moments.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from gregale.communication.reduce import keys_here, on_devices, shards_here
from gregale.methods.method import PsdpState

Expected = dict[str, tuple[tuple[int, ...], np.dtype]]


class InnerOptimizerState(NamedTuple):
    """A peer's inner optimizer after `step` inner steps, by shard key."""

    step: int
    arrays: dict[str, np.ndarray]


def on_host(state: PsdpState) -> dict[str, np.ndarray]:
    """Return this host's shards of a state's optimizer and buffers, by key; wait for the device."""
    found = {}
    for path, array in _arrays(state).items():
        found |= {key: np.array(shard) for key, shard in shards_here(path, array).items()}
    return found


def expected(state: PsdpState) -> Expected:
    """Return the shape and dtype of each array of `on_host`."""
    found = {}
    for path, array in _arrays(state).items():
        place = array.sharding
        assert isinstance(place, NamedSharding)
        shard = place.shard_shape(array.shape)
        found |= {key: (shard, np.dtype(array.dtype)) for key in keys_here(path, array.shape, place)}
    return found


def taken_over(state: PsdpState, arrays: Mapping[str, np.ndarray]) -> PsdpState:
    """Return the state with optimizer and buffers made of the shards `arrays`, and unchanged parameters."""
    own = _arrays(state)
    places = {path: array.sharding for path, array in own.items()}
    new = [on_devices(arrays, path, own[path].shape, place) for path, place in places.items()]  # pyright: ignore
    sharded, gathered, buffers = jax.tree.unflatten(jax.tree.structure(_parts(state)), new)
    return state._replace(sharded=sharded, gathered=gathered, buffers=buffers)


def _arrays(state: PsdpState) -> dict[str, jax.Array]:
    """Return the arrays of the optimizer and the buffers by path, in leaf order."""
    leaves = jax.tree_util.tree_flatten_with_path(_parts(state))[0]
    return {f"inner/{jax.tree_util.keystr(path, simple=True, separator='.')}": array for path, array in leaves}


def _parts(state: PsdpState) -> tuple:
    return state.sharded, state.gathered, state.buffers
