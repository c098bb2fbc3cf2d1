"""The token embedding: a lookup that sends nothing over `replica`, in the forward and the backward pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from gregale.axes.gather import scattered
from gregale.axes.layout import Layout
from gregale.model.execution import Execution


def embed(table: NamedArray, ids: NamedArray, execution: Execution) -> NamedArray:
    """Rows `ids` of the table: [..., position] -> [..., position, embed].

    Written per device in `jax.shard_map`: ids over `data`, table rows over `model`. A device looks up the rows that it
    holds, and the results are added over `model`; its gradient is a local scatter and one reduce-scatter over `data`.
    Left to the partitioner, the gradient's scatter crosses `replica` in every microbatch.

    Arguments:
    - `table`: [vocab, embed], gathered over `data` (`Execution.gathered`)
    - `ids`: integers in [0, vocab)
    """
    Vocab, Embed = table.axes
    found: Any = _embed(table.array, ids.array, (Vocab, Embed), ids.axes, execution.layout)
    return NamedArray(found, (*(axis.name for axis in ids.axes), Embed.name))


Axes = tuple[Axis, ...]


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _embed(table: jax.Array, ids: jax.Array, table_axes: Axes, ids_axes: Axes, layout: Layout) -> jax.Array:
    vocab_mesh_axes = layout.mesh_axes(table_axes[:1], layout.compute)

    def lookup(rows, ids):
        local, held = _local_rows(ids, rows.shape[0], vocab_mesh_axes)
        found = jnp.where(held[..., None], rows.at[local].get(mode="clip"), 0)
        return jax.lax.psum(found, vocab_mesh_axes) if vocab_mesh_axes else found

    return jax.shard_map(
        lookup,
        mesh=layout.mesh,
        in_specs=(layout.spec(table_axes, layout.compute), layout.spec(ids_axes, layout.compute)),
        out_specs=layout.spec((*ids_axes, table_axes[1]), layout.compute),
        check_vma=False,
    )(table, ids)


def _local_rows(ids: jax.Array, rows: int, vocab_mesh_axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """Where each id's row is among those of this device, and whether it is among them."""
    local = ids - jax.lax.axis_index(vocab_mesh_axes) * rows if vocab_mesh_axes else ids
    return local, (local >= 0) & (local < rows)


def _embed_forward(table, ids, table_axes, ids_axes, layout):
    return _embed(table, ids, table_axes, ids_axes, layout), (ids, jnp.zeros((0,), table.dtype))


def _embed_backward(table_axes, ids_axes, layout, saved, cotangent):
    ids, like = saved
    Vocab, Embed = table_axes
    vocab_mesh_axes = layout.mesh_axes((Vocab,), layout.compute)
    rows = Vocab.size // max(1, _product(layout, vocab_mesh_axes))

    def scatter(ids, cotangent):
        local, held = _local_rows(ids, rows, vocab_mesh_axes)
        # Added up in float32: a frequent token gets thousands of addends, which bfloat16 would drop.
        zeros = jnp.zeros((rows, Embed.size), jnp.float32)
        gradient = zeros.at[jnp.where(held, local, rows)].add(cotangent.astype(jnp.float32), mode="drop")
        return scattered(gradient.astype(like.dtype), table_axes, layout.mesh_axes(ids_axes, layout.compute), layout)

    gradient = jax.shard_map(
        scatter,
        mesh=layout.mesh,
        in_specs=(layout.spec(ids_axes, layout.compute), layout.spec((*ids_axes, Embed), layout.compute)),
        out_specs=layout.spec(table_axes, layout.params),
        check_vma=False,
    )(ids, cotangent)
    return gradient, None


def _product(layout: Layout, mesh_axes: tuple[str, ...]) -> int:
    size = 1
    for axis in mesh_axes:
        size *= layout.mesh.shape[axis]
    return size


_embed.defvjp(_embed_forward, _embed_backward)
