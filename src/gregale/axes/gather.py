"""Gather weights for use: cast them to the compute dtype, then all-gather them over `data`."""

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.sharding import NamedSharding, PartitionSpec

from gregale.axes.layout import BATCH, POSITION, Layout, is_named, mesh_axes_of
from gregale.axes.parameters import is_buffer, is_parameter, is_quantised

Tree = TypeVar("Tree")


def all_gather_weights(tree: Tree, layout: Layout, dtype: jnp.dtype) -> Tree:
    """Return the weights of `tree` in `dtype` under the `compute` mapping; buffers and other leaves stay.

    The cast comes before the gather, so that the gather moves the bytes of `dtype`. The gradient takes the opposite
    way: it is scattered to the `params` mapping first and then cast to the parameter's dtype. Quantised weights, which
    have no gradient, are gathered in their bits, and stay in them until they are `decoded`.
    """

    summed_over = layout.mesh_axes((BATCH, POSITION), layout.compute)

    def one(leaf):
        if is_quantised(leaf):
            return leaf.all_gathered(layout)
        if is_buffer(leaf) or not is_parameter(leaf.array if is_named(leaf) else leaf):
            return leaf
        if not is_named(leaf):
            return leaf.astype(dtype)
        compute = layout.sharding(leaf.axes, layout.compute)
        params = layout.sharding(leaf.axes, layout.params)
        return NamedArray(_gather(leaf.array, dtype, compute, params, summed_over), leaf.axis_names)

    return jax.tree.map(one, tree, is_leaf=lambda leaf: is_named(leaf) or is_buffer(leaf) or is_quantised(leaf))


def scattered(gradient: jax.Array, axes: Sequence[Axis], over: Sequence[str], layout: Layout) -> jax.Array:
    """Inside `jax.shard_map`: return the sum over mesh axes of a gathered weight's gradient, as the shard of `params`.

    One reduce-scatter for each mesh axis that `params` splits the weight by (for eight chips or more XLA:TPU replaces
    it with an all-reduce), one all-reduce for all others. Devices along an axis of `params` that is not in `over` have
    the same gradient, and keep their part.

    - `gradient`: this device's addend, [*axes] under `compute`
    - `over`: the mesh axes to sum over
    """
    left = list(over)
    splits = zip(layout.splits(axes, layout.compute), layout.splits(axes, layout.params), strict=True)
    for dimension, (gathered_over, stored_over) in enumerate(splits):
        for mesh_axis in stored_over:
            if mesh_axis in gathered_over:
                continue
            if mesh_axis not in left:
                gradient = own_part(gradient, dimension, mesh_axis)
            else:
                gradient = jax.lax.psum_scatter(gradient, mesh_axis, scatter_dimension=dimension, tiled=True)
                left.remove(mesh_axis)
    gradient = jax.lax.psum(gradient, tuple(left)) if left else gradient
    # Without the barrier XLA:TPU moves the sum out of the microbatch loop, where it needs a buffer for the gradient of
    # the whole weight; in bfloat16 this fails with an internal error.
    return jax.lax.optimization_barrier(gradient)


def own_part(shard: jax.Array, dimension: int, mesh_axis: str) -> jax.Array:
    """Inside `shard_map`: return a device's part of its shard when one more mesh axis splits a dimension."""
    size = shard.shape[dimension] // jax.lax.axis_size(mesh_axis)
    return jax.lax.dynamic_slice_in_dim(shard, jax.lax.axis_index(mesh_axis) * size, size, dimension)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(
    x: jax.Array, dtype, compute: NamedSharding, params: NamedSharding, summed_over: Sequence[str]
) -> jax.Array:
    shard = jax.lax.with_sharding_constraint(x.astype(dtype), params)
    return jax.lax.with_sharding_constraint(shard, compute)


def _gather_forward(x, dtype, compute, params, summed_over):
    return _gather(x, dtype, compute, params, summed_over), jnp.zeros((), x.dtype)


def _gather_backward(dtype, compute, params, summed_over, like, cotangent):
    if (sums := _sharding_of_sums(compute, params, summed_over)) != params:
        # XLA's partitioner computes wrong sums for a product whose result has a dimension in another order, or split
        # over a mesh axis along which it is the same.
        cotangent = jax.lax.optimization_barrier(jax.lax.with_sharding_constraint(cotangent, sums))
    return (jax.lax.with_sharding_constraint(cotangent, params).astype(like.dtype),)


def _sharding_of_sums(compute: NamedSharding, params: NamedSharding, summed_over: Sequence[str]) -> NamedSharding:
    """Return the sharding of a gradient summed over rows and positions; a device's part of `params` is a slice of it.

    It splits a dimension as `compute` does, and over those mesh axes of `params` that the sum takes, in the order of
    the mesh (`stage` last, as by default).
    """
    place = [*(axis for axis in params.mesh.axis_names if axis != "stage"), "stage"].index

    def entry(used, stored) -> tuple[str, ...] | None:
        kept = {*mesh_axes_of(used or ()), *summed_over}
        return tuple(sorted(kept.intersection(mesh_axes_of(stored or ())), key=place)) or None

    used = (*compute.spec, *[None] * (len(params.spec) - len(compute.spec)))
    return NamedSharding(params.mesh, PartitionSpec(*map(entry, used, params.spec)))


_gather.defvjp(_gather_forward, _gather_backward)
