"""The key/value cache of generation: written in place, a slot a token.

The rows of a batch have texts of different lengths. They end at the same place, and before a row's first token is
filling (it is filled up on the left), so that all of them write the same slot. A place is counted from the filling on,
a token's position from the row's first token on: position = place - first.
"""

from __future__ import annotations

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from gregale.axes.layout import BATCH
from gregale.model.execution import Execution

POSITION, SLOT = "position", "slot"


class Turn(eqx.Module):
    """Where the tokens of one call of `decode` stand, one of each row; the same for all layers.

    With fewer slots than places, which only a sliding window allows, a token overwrites the one that left the window:
    that of place p is in slot p modulo the slots.
    """

    slot: jax.Array  # the one to be written
    positions: NamedArray  # integers [Batch, Position 1]
    seen: NamedArray  # whether a slot, after the write, holds what the token sees: [Batch, Slot]

    @staticmethod
    def at(place, first: NamedArray, slots: int, window: int | None) -> Turn:
        """That of the tokens at a place.

        Arguments:
        - `first`: the place of each row's first token, integers [Batch]
        - `window`: how many tokens are seen, itself included; None: all
        """
        Slot = Axis(SLOT, slots)
        back = (place % slots - hax.arange(Slot) + slots) % slots  # how many places before this one
        reach = place - first
        reach = reach if window is None else hax.minimum(reach, window - 1)
        positions = (place - first).broadcast_axis(Axis(POSITION, 1)).rearrange((BATCH, POSITION))
        return Turn(place % slots, positions, back.broadcast_axis(first.axes) <= reach)


class Cache(eqx.Module):
    """Keys and values of one layer's tokens so far.

    Both are [Batch, KvHeads, Slot, HeadSize], less axes of size 1. A head's slots lie side by side, as attention reads
    them, and the products of attention take the arrays as they are; so XLA writes a token's slot in place. Were there
    anything between the write and a product, be it the dropping of an axis of size 1, it would become another write,
    into a copy of all slots. Slots after the last token hold nothing of use, and attention masks them.
    """

    key: NamedArray
    value: NamedArray

    @staticmethod
    def of_prompt(key: NamedArray, value: NamedArray, slots: int, execution: Execution) -> Cache:
        """Those of prompts, [Batch, Position, KvHeads, HeadSize]; of more tokens than `slots` the last ones."""
        return Cache(*(execution.placed(_with_room(_as_kept(new, slots), slots)) for new in (key, value)))

    def with_room(self, slots: int) -> Cache:
        """The same with room for `slots` tokens in all."""
        return Cache(_with_room(self.key, slots), _with_room(self.value, slots))

    def extended(self, key: NamedArray, value: NamedArray, slot, execution: Execution) -> Cache:
        """With the keys and values of one token of each row, [Batch, Position 1, KvHeads, HeadSize], in a slot."""

        def written(old: NamedArray, new: NamedArray) -> NamedArray:
            axis = old.axis_names.index(SLOT)
            array = jax.lax.dynamic_update_slice_in_dim(old.array, _as_kept(new, 1).array, slot, axis)
            return execution.placed(NamedArray(array, old.axis_names))

        return Cache(written(self.key, key), written(self.value, value))

    def attend(self, query: NamedArray, seen: NamedArray) -> NamedArray:
        """softmax(q . k / sqrt(head size)) . v of one token of each row, over the slots that it sees.

        Arguments:
        - `query`: [Batch, Position 1, Heads, HeadSize]
        - `seen`: [Batch, Slot]
        """
        Heads, HeadSize = query.resolve_axis("heads"), query.resolve_axis("head_size")
        kv_heads = self.key.axis_size("kv_heads") if "kv_heads" in self.key.axis_names else 1
        grouped = query.unflatten_axis(Heads, (Axis("kv_heads", kv_heads), Axis("group", Heads.size // kv_heads)))
        scores = hax.dot(grouped, self.key, axis=HeadSize, preferred_element_type=jnp.float32)
        weights = hax.nn.softmax(hax.where(seen, scores * HeadSize.size**-0.5, -jnp.inf), axis=SLOT)
        attended = hax.dot(weights.astype(self.value.dtype), self.value, axis=SLOT)
        return attended.rearrange((..., "kv_heads", "group", "head_size")).flatten_axes(("kv_heads", "group"), Heads)


def slots_of(caches) -> int:
    """The slots of the caches of a model's layers, stacked or in a tuple."""
    cache = caches[0] if isinstance(caches, tuple) else caches
    return cache.key.axis_size(SLOT)


def _as_kept(new: NamedArray, slots: int) -> NamedArray:
    """[Batch, Position, KvHeads, HeadSize] as the cache has it; of more tokens than `slots` the last ones."""
    ordered = new.rename({POSITION: SLOT}).rearrange((BATCH, "kv_heads", SLOT, "head_size"))
    if (over := ordered.axis_size(SLOT) - slots) > 0:
        last = ordered[SLOT, over:]
        ordered = NamedArray(jnp.roll(last.array, over, axis=last.axis_names.index(SLOT)), last.axis_names)
    for name in (BATCH, "kv_heads"):
        ordered = ordered[name, 0] if ordered.axis_size(name) == 1 else ordered
    return ordered


def _with_room(old: NamedArray, slots: int) -> NamedArray:
    more = [
        (0, slots - size if name == SLOT else 0) for name, size in zip(old.axis_names, old.array.shape, strict=True)
    ]
    return NamedArray(jnp.pad(old.array, more), old.axis_names)
