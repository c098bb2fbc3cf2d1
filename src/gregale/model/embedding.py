"""The token embedding: a lookup that sends nothing over `replica`, in the forward and the backward pass."""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.sharding import PartitionSpec

from gregale.axes.gather import scattered
from gregale.axes.layout import Layout
from gregale.axes.parameters import exchanges_rows
from gregale.model.execution import Execution


def embed(table: NamedArray, ids: NamedArray, execution: Execution) -> NamedArray:
    """Return rows `ids` of the table: [..., position] -> [..., position, embed].

    Written per device in `jax.shard_map`: ids over `data`, table rows over `model`. Left to the partitioner, the
    gradient's scatter crosses `replica` in every microbatch. `axes.vocabulary.exchanges_rows` chooses the form that
    sends less:

    - rows are exchanged: a device looks up its columns for all tokens of the devices that share the table, and an
      all-to-all completes the rows; another one returns the gradients, which are added to the device's columns
    - the table is gathered, and the gradient of all of it is summed over `data` (a reduce-scatter, or the compiler's
      replacement)

    In both, the rows are summed over `model`. With `Execution.weights_ready` the table is gathered already, and only
    the backward form is chosen. Gradients are summed in float32: a frequent token has thousands of addends, which
    bfloat16 would drop.

    - `table`: [vocab, embed], as a parameter; gathered already with `weights_ready`
    - `ids`: integers in [0, vocab)
    """
    Vocab, Embed = table.axes
    dtype = jnp.dtype(execution.dtype)
    lookup = Lookup(Vocab, Embed, ids.axes, execution.layout, dtype, execution.weights_ready)
    weight = table if lookup.exchanges else execution.gathered(table)
    found: Any = _embed(lookup, weight.array, ids.array)
    return NamedArray(found, (*(axis.name for axis in ids.axes), Embed.name))


@dataclass(frozen=True)
class Lookup:
    """The shapes and shardings of one call of `embed`."""

    Vocab: Axis
    Embed: Axis
    tokens: tuple[Axis, ...]
    layout: Layout
    dtype: jnp.dtype
    ready: bool

    @property
    def token_axes(self) -> tuple[str, ...]:
        return self.layout.mesh_axes(self.tokens, self.layout.compute)

    @property
    def row_axes(self) -> tuple[str, ...]:
        return self.layout.mesh_axes((self.Vocab,), self.layout.compute)

    @property
    def column_axes(self) -> tuple[str, ...]:
        """Return the mesh axes that split the columns of the table as a parameter."""
        return self.layout.mesh_axes((self.Embed,), self.layout.params)

    @property
    def shared(self) -> bool:
        """Return whether devices with other columns have other tokens; in generation they have the same."""
        return bool({*self.column_axes} & {*self.token_axes})

    @property
    def devices(self) -> int:
        """Return the number of devices that together have the columns of a row."""
        return self.layout.devices((self.Embed,), self.layout.params)

    @property
    def rows(self) -> int:
        """Return the rows of the table on a device."""
        return self.Vocab.size // self.layout.devices((self.Vocab,), self.layout.compute)

    @property
    def exchanges(self) -> bool:
        tokens = prod(axis.size for axis in self.tokens) // self.layout.devices(self.tokens, self.layout.compute)
        if self.layout.mesh_axes((self.Vocab,), self.layout.params) != self.row_axes:
            return False  # devices with the same columns have other rows
        if self.shared and not {*self.column_axes} <= {*self.token_axes}:
            return False  # some devices with other columns have the same tokens
        return exchanges_rows(tokens, self.Embed.size, self.rows, self.dtype.itemsize, self.devices)

    @property
    def ids_spec(self) -> PartitionSpec:
        return self.layout.spec(self.tokens, self.layout.compute)

    @property
    def found_spec(self) -> PartitionSpec:
        return self.layout.spec((*self.tokens, self.Embed), self.layout.compute)

    def table_spec(self, mapping) -> PartitionSpec:
        return self.layout.spec((self.Vocab, self.Embed), mapping)

    def local_rows(self, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the index of each id's row on this device, and whether the device has it."""
        local = ids - jax.lax.axis_index(self.row_axes) * self.rows if self.row_axes else ids
        return local, (local >= 0) & (local < self.rows)

    def look_up(self, table: jax.Array, ids: jax.Array) -> jax.Array:
        """Return [..., columns] of this device's rows and columns; zeros for rows of other devices."""
        local, held = self.local_rows(ids)
        return jnp.where(held[..., None], table.at[local].get(mode="clip"), 0)

    def summed(self, found: jax.Array) -> jax.Array:
        return jax.lax.psum(found, self.row_axes) if self.row_axes else found

    def scatter(self, ids: jax.Array, cotangent: jax.Array) -> jax.Array:
        """Return the gradient by this device's rows: [rows, columns], float32."""
        local, held = self.local_rows(ids)
        zeros = jnp.zeros((self.rows, cotangent.shape[-1]), jnp.float32)
        return zeros.at[jnp.where(held, local, self.rows)].add(cotangent.astype(jnp.float32), mode="drop")


# The lookup in a whole table.


def _from_whole(lookup: Lookup, table, ids):
    def local(table, ids):
        return lookup.summed(lookup.look_up(table, ids))

    specs = (lookup.table_spec(lookup.layout.compute), lookup.ids_spec)
    return lookup.layout.shard_map(local, specs, lookup.found_spec)(table, ids)


def _summed_gradient(lookup: Lookup, ids, cotangent, dtype):
    def local(ids, cotangent):
        gradient = lookup.scatter(ids, cotangent).astype(dtype)
        return scattered(gradient, (lookup.Vocab, lookup.Embed), lookup.token_axes, lookup.layout)

    specs = (lookup.ids_spec, lookup.found_spec)
    return lookup.layout.shard_map(local, specs, lookup.table_spec(lookup.layout.params))(ids, cotangent)


# The lookup that exchanges rows. `ids` are those of all devices that share the table: [devices * tokens], or the
# tokens that they all have.


def _ids_of_all(lookup: Lookup, ids):
    def local(ids):
        ids = ids.reshape(-1)
        return jax.lax.all_gather(ids, lookup.column_axes, tiled=True) if lookup.shared else ids

    return lookup.layout.shard_map(local, lookup.ids_spec, _spec_of_all(lookup))(ids)


def _spec_of_all(lookup: Lookup) -> PartitionSpec:
    return PartitionSpec(_others(lookup) or None)


def _others(lookup: Lookup) -> tuple[str, ...]:
    """Return the mesh axes that split the tokens and not the columns."""
    return tuple(axis for axis in lookup.token_axes if axis not in lookup.column_axes)


def _from_columns(lookup: Lookup, table, ids, shape: tuple[int, ...]):
    """Look up rows from columns; `shape` is that of the ids on a device."""
    devices, axes = lookup.devices, lookup.column_axes

    def local(table, ids):
        found = lookup.look_up(table.astype(lookup.dtype), ids)
        if lookup.shared:
            found = jax.lax.all_to_all(found.reshape(devices, -1, found.shape[-1]), axes, 0, 0).swapaxes(0, 1)
        else:
            found = jax.lax.all_gather(found, axes, axis=1, tiled=True)
        return lookup.summed(found.reshape(*shape, lookup.Embed.size))

    specs = (lookup.table_spec(lookup.layout.params), _spec_of_all(lookup))
    return lookup.layout.shard_map(local, specs, lookup.found_spec)(table, ids)


def _gradient_of_columns(lookup: Lookup, ids, cotangent, dtype):
    devices, axes, columns = lookup.devices, lookup.column_axes, lookup.Embed.size // lookup.devices

    def local(ids, cotangent):
        parts = cotangent.reshape(-1, devices, columns).swapaxes(0, 1)
        if lookup.shared:
            mine = jax.lax.all_to_all(parts, axes, 0, 0).reshape(-1, columns)
        else:
            mine = parts[jax.lax.axis_index(axes)]
        gradient = lookup.scatter(ids, mine)
        return (jax.lax.psum(gradient, _others(lookup)) if _others(lookup) else gradient).astype(dtype)

    specs = (_spec_of_all(lookup), lookup.found_spec)
    return lookup.layout.shard_map(local, specs, lookup.table_spec(lookup.layout.params))(ids, cotangent)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _embed(lookup: Lookup, table: jax.Array, ids: jax.Array) -> jax.Array:
    return _embed_forward(lookup, table, ids)[0]


def _embed_forward(lookup: Lookup, table, ids):
    like = jnp.zeros((0,), table.dtype)
    if not lookup.exchanges:
        return _from_whole(lookup, table, ids), (ids, like)
    every = _ids_of_all(lookup, ids)
    if lookup.ready:
        return _from_whole(lookup, table, ids), (every, like)
    shape = lookup.layout.sharding(lookup.tokens, lookup.layout.compute).shard_shape(ids.shape)
    return _from_columns(lookup, table, every, shape), (every, like)


def _embed_backward(lookup: Lookup, saved, cotangent):
    ids, like = saved
    gradient = _gradient_of_columns if lookup.exchanges else _summed_gradient
    return gradient(lookup, ids, cotangent, like.dtype), None


_embed.defvjp(_embed_forward, _embed_backward)
