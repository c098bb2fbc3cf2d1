"""Accumulate microbatches in one buffer per replica: the only module that computes training gradients."""

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from gregale.axes.layout import BATCH, REPLICA, Layout, Tree, is_named, vmap_over
from gregale.errors import UserError, multiples_near
from gregale.model.losses import Losses, losses_of

Loss = Callable[[Tree, Tree], Losses | tuple[jax.Array, jax.Array]]
"""loss(parameters, batch) -> `Losses`, or (sum of the examples' losses, sum of their weights)"""

MICROBATCH = "microbatch"


class Accumulated(NamedTuple):
    """Sums over a step's microbatches, each array with a leading [replica] axis; nothing is divided yet."""

    gradients: Tree  # [replica, ...] like the parameters, float32: gradients of the sum of losses and auxiliary terms
    loss: NamedArray  # [replica]: sum of losses
    weight: NamedArray  # [replica]: sum of weights
    named: dict[str, NamedArray]  # [replica]: sums of auxiliary terms and metrics
    statistics: dict[str, NamedArray]  # [replica, ...]: sums for buffers


def accumulate(
    loss: Loss, parameters: Tree, batch: Tree, layout: Layout, microbatches: int, prepare: Callable[[Tree], Tree]
) -> Accumulated:
    """Return the gradients of the sum of losses over each replica's part of the batch.

    `vmap over replica of: fold over microbatches of: sums + grad(loss)`. The buffers are sharded by `layout.params`,
    with a leading `replica` axis, so nothing crosses `replica` here.

    - `loss`: returns sums, so that a masked token weighs the same in every microbatch
    - `parameters`: arrays, shared by all replicas
    - `batch`: named arrays with an axis `batch`, or plain arrays whose first axis is the batch
    - `prepare`: applied to the parameters once, before the fold; the gradients are those of its result
    """
    inner = layout.inside_replica()
    Microbatch = Axis(MICROBATCH, microbatches)

    def one_replica(rows: Tree) -> Accumulated:
        ready = prepare(parameters)

        def trained(ready: Tree, microbatch: Tree) -> tuple[jax.Array, Losses]:
            found = losses_of(loss(ready, microbatch))
            return found.trained, found

        def add(sums: tuple, microbatch: Tree) -> tuple[tuple, list[dict[str, NamedArray]]]:
            (_, found), gradients = jax.value_and_grad(trained, has_aux=True)(ready, microbatch)
            gradients = inner.constrain(jax.tree.map(lambda x: x.astype(jnp.float32), gradients), inner.params)
            sums = jax.tree.map(jnp.add, sums, (gradients, hax.named(found.loss, ()), hax.named(found.weight, ())))
            named = {name: hax.named(value, ()) for name, value in found.named.items()}
            return (inner.constrain(sums[0], inner.params), *sums[1:]), [named, dict(found.statistics)]

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), ready)
        start = inner.constrain(zeros, inner.params), hax.zeros(()), hax.zeros(())
        (gradients, loss_sum, weight), of_each = hax.scan(add, Microbatch)(start, rows)
        named, statistics = jax.tree.map(lambda values: hax.sum(values, Microbatch), of_each, is_leaf=is_named)
        return Accumulated(gradients, loss_sum, weight, named, statistics)

    sums = vmap_over(one_replica, REPLICA, layout)(split_batch(batch, layout, microbatches))
    return sums._replace(gradients=layout.constrain(sums.gradients, layout.params))


def split_batch(batch: Tree, layout: Layout, microbatches: int) -> Tree:
    """Turn [batch, ...] into [replica, microbatch, batch / (replica * microbatch), ...] without moving a row.

    Every device keeps its contiguous rows and cuts them into microbatches.
    """
    inner = layout.inside_replica()
    shards = inner.devices((BATCH,), inner.compute)

    def cut(array: jax.Array) -> jax.Array:
        rows = rows_per_part(array.shape[0], layout, microbatches)
        parts = array.reshape(layout.replicas, shards, microbatches, rows, *array.shape[1:]).swapaxes(1, 2)
        return parts.reshape(layout.replicas, microbatches, shards * rows, *array.shape[1:])

    def one(leaf):
        if not isinstance(leaf, NamedArray):
            return cut(leaf)
        leaf = leaf.rearrange((BATCH, ...))
        parts = cut(leaf.array)
        axes = (layout.Replica, Axis(MICROBATCH, microbatches), Axis(BATCH, parts.shape[2]), *leaf.axes[1:])
        return layout.constrain(hax.named(parts, axes), {**layout.compute, **inner.compute})

    return jax.tree.map(one, batch, is_leaf=is_named)


def rows_per_part(rows: int, layout: Layout, microbatches: int) -> int:
    """Return the rows of one microbatch on one device; raise `UserError` if they cannot be divided evenly."""
    axes = layout.mesh_axes((BATCH,), layout.compute)
    sizes = {axis: layout.mesh.shape[axis] for axis in axes if axis in (REPLICA, "data") or layout.mesh.shape[axis] > 1}
    parts = prod(sizes.values()) * microbatches
    if rows % parts:
        product = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise UserError(
            f"batch.size is {rows}: a batch is shared by {product} x microbatches {microbatches} = {parts} parts, and "
            f"{rows} / {parts} = {rows / parts:.4g} is not a whole number of rows. batch.size "
            f"{multiples_near(rows, parts)} would work, or another number of microbatches."
        )
    return rows // parts
