"""The key/value cache of generation: written in place, a slot a token.

The rows of a batch have texts of different lengths. They end at the same index: rows are padded on the left, so that
all of them write the same slot. An index counts from the padding on, a token's position from the row's first token on:
position = index - first.

Devices that share a sequence share the slots: of n devices, device i has the slots i, i + n, i + 2n and so on, so that
more slots move none.
"""

from dataclasses import replace
from functools import partial

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax.sharding import PartitionSpec

from gregale.axes.layout import BATCH, POSITION
from gregale.axes.parameters import chunk_order, is_stacks
from gregale.model.execution import Execution
from gregale.model.kernels.operations import capped

SLOT = "slot"
AS_GIVEN = (BATCH, POSITION, "kv_heads", "head_size")  # keys and values of a layer


class DecodeStep(eqx.Module):
    """The position in the cache of the tokens of one `decode` call, one of each row; the same for all layers.

    With fewer slots than indices, which only a sliding window allows, a token overwrites the one that left the window:
    the token at index p is in slot p modulo the slots.
    """

    slot: jax.Array  # the slot to write
    positions: NamedArray  # integers [Batch, Position 1]
    seen: NamedArray  # whether the token sees a slot after the write: [Batch, Slot], slots as the devices have them

    @staticmethod
    def at(place, first: NamedArray, slots: int, window: int | None, devices: int = 1) -> "DecodeStep":
        """Return the step of the tokens at an index.

        - `first`: the index of each row's first token, integers [Batch]
        - `window`: the number of tokens that a token sees, itself included; None: all
        - `devices`: n, that share the slots
        """
        slot = place % slots
        held = hax.named(np.arange(slots).reshape(-1, devices).T.reshape(-1), Axis(SLOT, slots))
        back = slot - held
        back = hax.where(back < 0, back + slots, back)  # the distance to this index
        reach = place - first
        reach = reach if window is None else hax.minimum(reach, window - 1)
        positions = (place - first).broadcast_axis(Axis(POSITION, 1)).rearrange((BATCH, POSITION))
        return DecodeStep(slot, positions, back.broadcast_axis(first.axes) <= reach)


class Cache(eqx.Module):
    """The keys and values of one layer's tokens so far.

    On each device both are [Cell, Slot, HeadSize], a cell for each of its rows and key/value heads, or with one cell
    [Slot, HeadSize]. Slots are those of the device; the global arrays are those of the devices one after another. A
    cell's slots are adjacent, as attention reads them, and the products of attention take the arrays unchanged; so XLA
    writes a token's slot in place. Any operation between the write and a product, even the removal of an axis of size
    1, becomes another write, into a copy of all slots. Attention masks the slots after the last token.
    """

    key: jax.Array
    value: jax.Array
    slots: int = eqx.field(static=True)

    @staticmethod
    def of_prompt(key: NamedArray, value: NamedArray, slots: int, execution: Execution) -> "Cache":
        """Return the cache of prompts, [Batch, Position, KvHeads, HeadSize]; of their last `slots` tokens if more.

        Devices that share the prompts gather them, and keep their slots; these are rounded up to equal numbers.
        """
        on = Devices(execution)
        slots = on.rounded(slots)
        keep = on.layout.shard_map(lambda new: on.own_slots(_kept(on.whole(new), slots)), (on.of_keys,), on.of_cells)
        return Cache(keep(key.rearrange(AS_GIVEN).array), keep(value.rearrange(AS_GIVEN).array), slots)

    def with_room(self, slots: int, execution: Execution) -> "Cache":
        """Return the cache with more slots, rounded up as by `of_prompt`; valid until a slot is written again."""
        on = Devices(execution)
        slots = on.rounded(slots)
        own = slots // on.sharing
        widen = on.layout.shard_map(lambda old: _with_room(old, own), (on.of_cells,), on.of_cells)
        return Cache(widen(self.key), widen(self.value), slots)

    def attend(
        self,
        query: NamedArray,
        key: NamedArray,
        value: NamedArray,
        turn: DecodeStep,
        execution: Execution,
        cap: float | None = None,
        sinks: NamedArray | None = None,
    ) -> "tuple[NamedArray, Cache]":
        """Compute softmax(q . k / sqrt(head size)) . v of one token of each row, which is written first.

        Returns the result, and the cache with its key and value.

        - `query`: [Batch, Position 1, Heads, HeadSize]
        - `key`, `value`: [Batch, Position 1, KvHeads, HeadSize]
        - `cap`: the limit of the scores, by tanh; None: no limit
        - `sinks`: logits without a value, [Heads]; None: there are none
        """
        on = Devices(execution)
        attend = on.layout.shard_map(
            partial(_attend, cap, on),
            (*[on.of_cells] * 2, *[on.of_queries] * 2, *[on.of_keys] * 2, on.of_seen, PartitionSpec()),
            (on.of_queries, on.of_cells, on.of_cells),
        )
        query, key, value = (
            new.rearrange((BATCH, POSITION, heads, "head_size"))
            for new, heads in ((query, "heads"), (key, "kv_heads"), (value, "kv_heads"))
        )
        seen = turn.seen.rearrange((BATCH, SLOT)).array
        shape = (*query.array.shape[:3], 1)
        of_queries = None if sinks is None else jnp.broadcast_to(sinks.array[:, None], shape)
        arrays = (self.key, self.value, query.array, of_queries, key.array, value.array, seen, turn.slot)
        attended, keys, values = attend(*arrays)
        return NamedArray(attended, query.axis_names), Cache(keys, values, self.slots)


class Devices:
    """The split of attention's arrays over devices; each device computes its own rows, heads and slots.

    - `sharing`: devices that share the slots; they share the positions of prompts
    """

    def __init__(self, execution: Execution):
        self.layout = layout = execution.layout
        mapping = layout.compute
        self._over = layout.mesh_axes((POSITION, SLOT), mapping)
        self.sharing = layout.devices((POSITION, SLOT), mapping)
        self.of_keys = layout.spec(AS_GIVEN, mapping)
        self.of_queries = layout.spec((BATCH, POSITION, "heads", "head_size"), mapping)
        self.of_seen = PartitionSpec(mapping.get(BATCH), self._over or None)
        self.of_cells = PartitionSpec((*layout.mesh_axes((BATCH, "kv_heads"), mapping), *self._over) or None)

    def rounded(self, slots: int) -> int:
        return -(-slots // self.sharing) * self.sharing

    # The following methods are for a device, inside of `shard_map`.

    def whole(self, new: jax.Array) -> jax.Array:
        """Return all positions of prompts [row, position, ...] in their order, given those of the device."""
        if self.sharing == 1:
            return new
        gathered = jax.lax.all_gather(new, self._over, axis=1, tiled=True)
        chunks = gathered.reshape(new.shape[0], 2 * self.sharing, -1, *new.shape[2:])
        return chunks[:, np.argsort(chunk_order(self.sharing))].reshape(gathered.shape)

    def own_slots(self, cells: jax.Array) -> jax.Array:
        """Return the slots of the device, given all: [..., slot, channel]."""
        if self.sharing == 1:
            return cells
        by_device = cells.reshape(*cells.shape[:-2], -1, self.sharing, cells.shape[-1])
        return jax.lax.dynamic_index_in_dim(by_device, jax.lax.axis_index(self._over), by_device.ndim - 2, False)

    def written(self, old: jax.Array, new: jax.Array, slot: jax.Array) -> jax.Array:
        """Return cells with a new slot; other devices than the slot's write what they have."""
        axis, own = old.ndim - 2, slot // self.sharing
        if self.sharing > 1:
            kept = jax.lax.dynamic_slice_in_dim(old, own, 1, axis)
            new = jnp.where(slot % self.sharing == jax.lax.axis_index(self._over), new, kept)
        return jax.lax.dynamic_update_slice_in_dim(old, new, own, axis)

    def largest(self, x: jax.Array) -> jax.Array:
        return jax.lax.pmax(x, self._over) if self.sharing > 1 else x

    def summed(self, x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, self._over) if self.sharing > 1 else x


def for_tokens(execution: Execution) -> Execution:
    """Return the execution of single tokens: the devices that share the positions of prompts share the slots."""
    layout = execution.layout
    compute = {SLOT if name == POSITION else name: axes for name, axes in layout.compute.items()}
    return replace(execution, layout=replace(layout, compute=compute))


def slots_of(caches) -> int:
    """Return the slots of the caches of a model's layers, stacked or in a tuple."""
    stack = caches.parts[0] if is_stacks(caches) else caches
    return (stack[0] if isinstance(stack, tuple) else stack).slots


# The computation of a device for its rows and heads.


def _attend(cap: float | None, on: Devices, keys, values, query, sinks, key, value, seen, slot):
    """Devices that share the slots add up their sums, which are relative to the largest score of all."""
    rows, _, heads, size = query.shape
    keys, values = on.written(keys, _cells(key), slot), on.written(values, _cells(value), slot)
    grouped = query.reshape(*keys.shape[:-2], -1, size)
    scores = jnp.einsum("...gd,...sd->...gs", grouped, keys, preferred_element_type=jnp.float32)
    by_row = capped(scores.reshape(rows, heads, -1) * size**-0.5, cap)
    by_row = jnp.where(seen[:, None], by_row, -jnp.inf)
    most = on.largest(jnp.max(by_row, axis=-1, keepdims=True))
    sinks = None if sinks is None else sinks.astype(jnp.float32).reshape(most.shape)
    most = most if sinks is None else jnp.maximum(most, sinks)
    weights = jnp.exp(by_row - most).reshape(scores.shape)
    output = jnp.einsum("...gs,...sd->...gd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    sums = on.summed(jnp.concatenate([output, jnp.sum(weights, axis=-1, keepdims=True)], axis=-1))
    total = sums[..., -1:] if sinks is None else sums[..., -1:] + jnp.exp(sinks - most).reshape(sums[..., -1:].shape)
    attended = sums[..., :-1] / total
    return attended.astype(query.dtype).reshape(query.shape), keys, values


def _cells(new: jax.Array) -> jax.Array:
    """Turn [row, position, kv head, channel] into [cell, position, channel], or [position, channel] of one cell."""
    rows, positions, heads, size = new.shape
    cells = new.swapaxes(1, 2).reshape(rows * heads, positions, size)
    return cells[0] if len(cells) == 1 else cells


def _kept(new: jax.Array, slots: int) -> jax.Array:
    """Return the cells of prompts; of more tokens than slots the last ones, each in its slot."""
    cells = _cells(new)
    if (over := cells.shape[-2] - slots) > 0:
        cells = jnp.roll(cells[..., over:, :], over, axis=-2)
    return _with_room(cells, slots)


def _with_room(cells: jax.Array, slots: int) -> jax.Array:
    more = [(0, 0)] * cells.ndim
    more[-2] = (0, slots - cells.shape[-2])
    return jnp.pad(cells, more)
