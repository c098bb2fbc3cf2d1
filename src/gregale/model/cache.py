"""The key/value cache of generation: written in place, a slot a token."""

from __future__ import annotations

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from gregale.axes.layout import BATCH
from gregale.model.execution import Execution

POSITION, SLOT = "position", "slot"


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
        """Those of a prompt, [Batch, Position, KvHeads, HeadSize], with room for `slots` tokens in all."""
        return Cache(*(execution.placed(_with_room(_as_kept(new), slots)) for new in (key, value)))

    def with_room(self, slots: int) -> Cache:
        """The same with room for `slots` tokens in all."""
        return Cache(_with_room(self.key, slots), _with_room(self.value, slots))

    def extended(self, key: NamedArray, value: NamedArray, place) -> Cache:
        """With the key and value of the token at a place, [Batch, Position 1, KvHeads, HeadSize]."""

        def written(old: NamedArray, new: NamedArray) -> NamedArray:
            axis = old.axis_names.index(SLOT)
            array = jax.lax.dynamic_update_slice_in_dim(old.array, _as_kept(new).array, place, axis)
            return NamedArray(array, old.axis_names)

        return Cache(written(self.key, key), written(self.value, value))

    def attend(self, query: NamedArray, place, window: int | None) -> NamedArray:
        """softmax(q . k / sqrt(head size)) . v of the token at a place, over itself and the tokens before it.

        Arguments:
        - `query`: [Batch, Position 1, Heads, HeadSize]
        - `window`: how many tokens are seen, itself included; None: all
        """
        Heads, HeadSize = query.resolve_axis("heads"), query.resolve_axis("head_size")
        kv_heads = self.key.axis_size("kv_heads") if "kv_heads" in self.key.axis_names else 1
        Slot = self.key.resolve_axis(SLOT)
        grouped = query.unflatten_axis(Heads, (Axis("kv_heads", kv_heads), Axis("group", Heads.size // kv_heads)))
        back = place - hax.arange(Slot)
        seen = back >= 0 if window is None else (back >= 0) & (back < window)
        scores = hax.dot(grouped, self.key, axis=HeadSize, preferred_element_type=jnp.float32)
        weights = hax.nn.softmax(hax.where(seen, scores * HeadSize.size**-0.5, -jnp.inf), axis=Slot)
        attended = hax.dot(weights.astype(self.value.dtype), self.value, axis=Slot)
        return attended.rearrange((..., "kv_heads", "group", "head_size")).flatten_axes(("kv_heads", "group"), Heads)


def _as_kept(new: NamedArray) -> NamedArray:
    """[Batch, Position, KvHeads, HeadSize] as the cache has it."""
    ordered = new.rename({POSITION: SLOT}).rearrange((BATCH, "kv_heads", SLOT, "head_size"))
    for name in (BATCH, "kv_heads"):
        ordered = ordered[name, 0] if ordered.axis_size(name) == 1 else ordered
    return ordered


def _with_room(old: NamedArray, slots: int) -> NamedArray:
    more = [
        (0, slots - size if name == SLOT else 0) for name, size in zip(old.axis_names, old.array.shape, strict=True)
    ]
    return NamedArray(jnp.pad(old.array, more), old.axis_names)
