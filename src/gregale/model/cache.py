"""The key/value cache of generation: written in place, a slot a token.

The rows of a batch have texts of different lengths. They end at the same place, and before a row's first token is
filling (it is filled up on the left), so that all of them write the same slot. A place is counted from the filling on,
a token's position from the row's first token on: position = place - first.
"""

from __future__ import annotations

from functools import partial

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.sharding import PartitionSpec

from gregale.axes.layout import BATCH
from gregale.model.execution import Execution
from gregale.model.kernels.reference import capped

POSITION, SLOT = "position", "slot"
AS_GIVEN = (BATCH, POSITION, "kv_heads", "head_size")  # keys and values of a layer


class DecodeStep(eqx.Module):
    """Where the tokens of one call of `decode` stand, one of each row; the same for all layers.

    With fewer slots than places, which only a sliding window allows, a token overwrites the one that left the window:
    that of place p is in slot p modulo the slots.
    """

    slot: jax.Array  # the one to be written
    positions: NamedArray  # integers [Batch, Position 1]
    seen: NamedArray  # whether a slot, after the write, holds what the token sees: [Batch, Slot]

    @staticmethod
    def at(place, first: NamedArray, slots: int, window: int | None) -> DecodeStep:
        """That of the tokens at a place.

        Arguments:
        - `first`: the place of each row's first token, integers [Batch]
        - `window`: how many tokens are seen, itself included; None: all
        """
        Slot = Axis(SLOT, slots)
        slot = place % slots
        back = slot - hax.arange(Slot)
        back = hax.where(back < 0, back + slots, back)  # how many places before this one
        reach = place - first
        reach = reach if window is None else hax.minimum(reach, window - 1)
        positions = (place - first).broadcast_axis(Axis(POSITION, 1)).rearrange((BATCH, POSITION))
        return DecodeStep(slot, positions, back.broadcast_axis(first.axes) <= reach)


class Cache(eqx.Module):
    """Keys and values of one layer's tokens so far.

    On each device both are [Cell, Slot, HeadSize], a cell for each of its rows and key/value heads, or with one cell
    [Slot, HeadSize]; the global arrays are those of the devices one after another. A cell's slots lie side by side, as
    attention reads them, and the products of attention take the arrays as they are; so XLA writes a token's slot in
    place. Were there anything between the write and a product, be it the dropping of an axis of size 1, it would become
    another write, into a copy of all slots. Slots after the last token hold nothing of use, and attention masks them.
    """

    key: jax.Array
    value: jax.Array
    slots: int = eqx.field(static=True)

    @staticmethod
    def of_prompt(key: NamedArray, value: NamedArray, slots: int, execution: Execution) -> Cache:
        """Those of prompts, [Batch, Position, KvHeads, HeadSize]; of more tokens than `slots` the last ones."""
        on = Devices(execution)
        keep = on.sharded(lambda new: _kept(new, slots), (on.of_keys,), on.of_cells)
        return Cache(keep(key.rearrange(AS_GIVEN).array), keep(value.rearrange(AS_GIVEN).array), slots)

    def with_room(self, slots: int, execution: Execution) -> Cache:
        """The same with room for `slots` tokens in all."""
        on = Devices(execution)
        widen = on.sharded(lambda old: _with_room(old, slots), (on.of_cells,), on.of_cells)
        return Cache(widen(self.key), widen(self.value), slots)

    def attend(
        self,
        query: NamedArray,
        key: NamedArray,
        value: NamedArray,
        turn: DecodeStep,
        execution: Execution,
        cap: float | None = None,
    ) -> tuple[NamedArray, Cache]:
        """softmax(q . k / sqrt(head size)) . v of one token of each row, which is written first.

        Returns what it attends to, and the cache with its key and value.

        Arguments:
        - `query`: [Batch, Position 1, Heads, HeadSize]
        - `key`, `value`: [Batch, Position 1, KvHeads, HeadSize]
        - `cap`: what bounds the scores, by tanh; None: nothing
        """
        on = Devices(execution)
        attend = on.sharded(
            partial(_attend, cap),
            (on.of_cells, on.of_cells, on.of_queries, on.of_keys, on.of_keys, on.of_seen, PartitionSpec()),
            (on.of_queries, on.of_cells, on.of_cells),
        )
        query, key, value = (
            new.rearrange((BATCH, POSITION, heads, "head_size"))
            for new, heads in ((query, "heads"), (key, "kv_heads"), (value, "kv_heads"))
        )
        seen = turn.seen.rearrange((BATCH, SLOT)).array
        attended, keys, values = attend(self.key, self.value, query.array, key.array, value.array, seen, turn.slot)
        return NamedArray(attended, query.axis_names), Cache(keys, values, self.slots)


class Devices:
    """How the arrays of attention lie on the devices, each of which works on its own rows and heads."""

    def __init__(self, execution: Execution):
        self._layout = layout = execution.layout
        mapping = layout.compute
        self.of_keys = layout.spec(AS_GIVEN, mapping)
        self.of_queries = layout.spec((BATCH, POSITION, "heads", "head_size"), mapping)
        self.of_seen = layout.spec((BATCH, SLOT), mapping)
        self.of_cells = PartitionSpec(layout.mesh_axes((BATCH, "kv_heads"), mapping) or None)

    def sharded(self, function, in_specs, out_specs):
        return jax.shard_map(function, mesh=self._layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def slots_of(caches) -> int:
    """The slots of the caches of a model's layers, stacked or in a tuple."""
    return (caches[0] if isinstance(caches, tuple) else caches).slots


# What a device does with its rows and heads.


def _attend(cap: float | None, keys, values, query, key, value, seen, slot):
    rows, _, heads, size = query.shape
    keys, values = (
        jax.lax.dynamic_update_slice_in_dim(old, _cells(new), slot, old.ndim - 2)
        for old, new in ((keys, key), (values, value))
    )
    grouped = query.reshape(*keys.shape[:-2], -1, size)
    scores = jnp.einsum("...gd,...sd->...gs", grouped, keys, preferred_element_type=jnp.float32)
    by_row = capped(scores.reshape(rows, heads, -1) * size**-0.5, cap)
    weights = jax.nn.softmax(jnp.where(seen[:, None], by_row, -jnp.inf), axis=-1)
    attended = jnp.einsum("...gs,...sd->...gd", weights.reshape(scores.shape).astype(values.dtype), values)
    return attended.reshape(query.shape), keys, values


def _cells(new: jax.Array) -> jax.Array:
    """[row, position, kv head, channel] -> [cell, position, channel], or [position, channel] of one cell."""
    rows, positions, heads, size = new.shape
    cells = new.swapaxes(1, 2).reshape(rows * heads, positions, size)
    return cells[0] if len(cells) == 1 else cells


def _kept(new: jax.Array, slots: int) -> jax.Array:
    """The cells of prompts; of more tokens than slots the last ones, each in its slot."""
    cells = _cells(new)
    if (over := cells.shape[-2] - slots) > 0:
        cells = jnp.roll(cells[..., over:, :], over, axis=-2)
    return _with_room(cells, slots)


def _with_room(cells: jax.Array, slots: int) -> jax.Array:
    more = [(0, 0)] * cells.ndim
    more[-2] = (0, slots - cells.shape[-2])
    return jnp.pad(cells, more)
