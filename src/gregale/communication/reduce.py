"""Gradients accumulated for each replica, and their exact average over `replica`, which leaves each device its shard.

`quantised` has the same methods for values of few bits. No other module reduces over `replica`.

The gradients of the later layers are complete before the backward pass of the first, and the later layers' weights are
needed after the forward pass of the first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.sharding import PartitionSpec

from gregale.axes.gather import own_part
from gregale.axes.layout import BATCH, REPLICA, Layout, Tree, is_named, vmap_over
from gregale.axes.parameters import layer_numbers, layer_order, layers_axis
from gregale.errors import UserError, multiples_near
from gregale.model.losses import Losses, losses_of
from gregale.optim.config import global_norm


@dataclass(frozen=True)
class ExactReducer:
    """Averages a tree over `axis` in float32 and gathers the updates computed from the averages.

    A method calls `reduce` and `all_gather_params` once a step each, and passes the error of one call to the next. Here
    the error is None; `communication.quantised.QuantisedReducer`, with the same methods, returns the unsent rest.
    """

    layout: Layout
    axis: str = REPLICA

    quantised: ClassVar[Literal[False]] = False

    def init(self, tree: Tree) -> None:
        """Return the error before the first step, for a tree of arrays without the axis."""

    def shardings(self, error: None) -> None:
        """Return the sharding of each array of an error."""

    def all_reduce_scalars(self, *arrays: NamedArray) -> list[jax.Array]:
        """Return sums over the axis of [replica, ...] arrays, whole on each device: weights, losses, statistics."""
        return [_sum_over(array.array, self.axis, (), self.layout) for array in arrays]

    def reduce(self, sums: Tree, weight: jax.Array, error: None) -> tuple[Tree, None]:
        return reduce_replicas(sums, weight, self.layout, self.axis), error

    def all_gather_params(self, reduced: Tree, error: None) -> tuple[Tree, None]:
        """Gather values from `opt_state` to `params`: one all-gather over `axis` per array."""
        return all_gather_params(reduced, self.layout), error

    def norm(self, reduced: Tree) -> jax.Array:
        """Return the L2 norm of a tree under `opt_state`."""
        return global_norm(reduced)

    def bytes_sent(self, tree: Tree) -> int:
        """Return the bytes that a device sends over `axis` to reduce and gather a tree, without totals and norm.

        2 (n - 1) / n of its float32 shard, on n replicas. Replicas that share a device count as if each had its own.

        - `tree`: named or plain arrays without the axis, or their abstract forms
        """
        return self._share(2 * sum(self._shards(tree)))

    def reduce_bytes(self, tree: Tree) -> int:
        """Return the part of `bytes_sent` that `reduce` sends: twice (n - 1) / n of what the axis does not split."""
        split, others = self._shards(tree)
        return self._share(split + 2 * others)

    def gather_bytes(self, tree: Tree) -> int:
        """Return the part of `bytes_sent` that `all_gather_params` sends."""
        return self._share(self._shards(tree)[0])

    def _share(self, size: int) -> int:
        n = self.layout.axis(self.axis).size
        return (n - 1) * size // n

    def _shards(self, tree: Tree) -> tuple[int, int]:
        """Return the bytes of a device's float32 shards without the axis: of arrays that it splits, and of others."""
        layout, found = self.layout, [0, 0]
        for leaf in jax.tree.leaves(tree, is_leaf=is_named):
            axes = leaf.axes if isinstance(leaf, NamedArray) else ()
            finest = {*layout.mesh_axes(axes, layout.params), *layout.mesh_axes(axes, layout.opt_state)}
            shard = 4 * leaf.size // prod(layout.mesh.shape[name] for name in finest - {self.axis})
            found[self.axis not in finest] += shard
        return found[0], found[1]


def reduce_replicas(sums: Tree, weight: jax.Array | int, layout: Layout, axis: str = REPLICA) -> Tree:
    """Return `(sum over replica of sums) / weight`, under the `opt_state` mapping.

    An array that `opt_state` splits over `replica` takes exactly one reduce-scatter over `replica`: a device's shard
    of the result is a slice of its own shard of the sums. Others (too small to be split) take one all-reduce.

    - `sums`: named arrays with an axis `replica`, or plain arrays whose first axis is the replica; under `params`
    - `weight`: scalar, the total of all replicas
    - `axis`: the axis to reduce, by default `replica`
    """

    def one(leaf):
        if not isinstance(leaf, NamedArray):
            return _sum_over(leaf, axis, (), layout) / weight
        leaf = leaf.rearrange((axis, ...))
        names = tuple(each.name for each in leaf.axes[1:])
        return NamedArray(_sum_over(leaf.array, axis, names, layout) / weight, names)

    return jax.tree.map(one, sums, is_leaf=is_named)


def max_over_replicas(array: NamedArray, layout: Layout, axis: str = REPLICA) -> NamedArray:
    """Return the largest values over the axis of [replica, ...], whole on each device."""
    names = array.axis_names[1:]
    if axis not in layout.params:
        return NamedArray(array.array[0], names)

    def largest(local: jax.Array) -> jax.Array:
        return jax.lax.pmax(jnp.max(local, axis=0), axis)

    return NamedArray(layout.shard_map(largest, PartitionSpec(axis), PartitionSpec())(array.array), names)


def _sum_over(array: jax.Array, axis: str, names: tuple[str, ...], layout: Layout) -> jax.Array:
    """Sum [axis, *names] under `params` over the first axis to [*names] under `opt_state`."""
    if axis not in layout.params:
        return array[0]
    cuts = further_splits(names, layout)

    def add(shard: jax.Array) -> jax.Array:
        shard, summed = shard[0] if shard.shape[0] == 1 else jnp.sum(shard, axis=0), False
        for dimension, mesh_axes in enumerate(cuts):
            for mesh_axis in mesh_axes:
                if mesh_axis == axis:
                    shard, summed = _scattered(shard, dimension, axis), True
                else:
                    shard = own_part(shard, dimension, mesh_axis)
        return shard if summed else jax.lax.psum(shard, axis)

    before = PartitionSpec(axis, *layout.spec(names, layout.params))
    after = layout.spec(names, layout.opt_state)
    return layout.shard_map(add, before, after)(array)


def _scattered(shard: jax.Array, dimension: int, axis: str) -> jax.Array:
    """Inside `shard_map`: sum over a mesh axis and return a device's part of a dimension.

    That dimension is sent as the first: if a part of it is the last, the TPU compiler pads it to 128 values.
    """
    return jnp.moveaxis(jax.lax.psum_scatter(jnp.moveaxis(shard, dimension, 0), axis, tiled=True), 0, dimension)


def further_splits(names: Sequence[str], layout: Layout) -> list[tuple[str, ...]]:
    """Return, for each axis of an array, the mesh axes by which `opt_state` splits it further than `params` does."""
    both = zip(layout.splits(names, layout.params), layout.splits(names, layout.opt_state), strict=True)
    return [fine[len(coarse) :] for coarse, fine in both]


def all_gather_params(reduced: Tree, layout: Layout) -> Tree:
    """Gather values from `opt_state` to `params`: one all-gather over `replica` per array."""
    return layout.constrain(reduced, layout.params)


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
    maxima: dict[str, NamedArray]  # [replica, ...]: largest values, as `Losses.maxima`


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

        def add(sums: tuple, microbatch: Tree) -> tuple[tuple, tuple]:
            (_, found), gradients = jax.value_and_grad(trained, has_aux=True)(ready, microbatch)
            gradients = inner.constrain(jax.tree.map(lambda x: x.astype(jnp.float32), gradients), inner.params)
            sums = jax.tree.map(jnp.add, sums, (gradients, hax.named(found.loss, ()), hax.named(found.weight, ())))
            named = {name: hax.named(value, ()) for name, value in found.named.items()}
            sums = inner.constrain(sums[0], inner.params), *sums[1:]
            return sums, ([named, dict(found.statistics)], dict(found.maxima))

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), ready)
        start = inner.constrain(zeros, inner.params), hax.zeros(()), hax.zeros(())
        (gradients, loss_sum, weight), (added, highest) = hax.scan(add, Microbatch)(start, rows)
        named, statistics = jax.tree.map(lambda values: hax.sum(values, Microbatch), added, is_leaf=is_named)
        maxima = jax.tree.map(lambda values: hax.max(values, Microbatch), highest, is_leaf=is_named)
        return Accumulated(gradients, loss_sum, weight, named, statistics, maxima)

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
    sizes = {axis: layout.parts(axis) for axis in axes if axis in (REPLICA, "data") or layout.mesh.shape[axis] > 1}
    parts = prod(sizes.values()) * microbatches
    if rows % parts:
        product = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise UserError(
            f"batch.size is {rows}: a batch is shared by {product} x microbatches {microbatches} = {parts} parts, and "
            f"{rows} / {parts} = {rows / parts:.4g} is not a whole number of rows. batch.size "
            f"{multiples_near(rows, parts)} would work, or another number of microbatches."
        )
    return rows // parts


class LayerGroups(eqx.Module):
    """A stack of layers, cut along their axis."""

    parts: tuple[NamedArray, NamedArray]  # of the first layers, and of the others


def cut_layers(tree: Tree, first: int) -> Tree:
    """Cut the first layers off every stack, into `LayerGroups`; a stack of only first or later layers stays whole."""
    numbers = layer_numbers(layer_order(tree))

    def one(leaf):
        axis = layers_axis(leaf)
        rows = sum(number < first for number in numbers.get(axis or "", ()))
        if axis is None or rows in (0, len(numbers[axis])):
            return leaf
        place = leaf.axis_names.index(axis)
        before, after = jax.lax.split(leaf.array, [rows, leaf.array.shape[place] - rows], axis=place)
        return LayerGroups((NamedArray(before, leaf.axis_names), NamedArray(after, leaf.axis_names)))

    return jax.tree.map(one, tree, is_leaf=is_named)


def joined_layers(tree: Tree) -> Tree:
    """Invert `cut_layers`."""

    def one(leaf):
        if not isinstance(leaf, LayerGroups):
            return leaf
        names = leaf.parts[0].axis_names
        place = names.index(layers_axis(leaf.parts[0]))
        return NamedArray(jnp.concatenate([part.array for part in leaf.parts], place), names)

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, LayerGroups))


@dataclass(frozen=True)
class ShardedLeaf:
    """An array of a tree on one device, without the axis that is reduced (`replica`, `island`)."""

    path: str  # its path in the tree
    axes: tuple[Axis, ...]  # its axes; a plain array's are named by their index
    named: bool  # whether it is a NamedArray
    params: PartitionSpec  # its partition under this mapping
    opt_state: PartitionSpec  # likewise
    shape: tuple[int, ...]  # of a device's shard under `params`
    split: int | None  # the dimension that `opt_state` splits over that axis, None if it splits none
    replicas: int  # the number of shards to cut it into
    per_device: int  # the number of replicas on a device

    @property
    def exact(self) -> bool:
        """Return whether it is a scalar: scalars are metrics, not parameters, and are sent exactly."""
        return not self.axes

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Return a replica's part of a shard under `params`; of an unsplit array, its part of the padded flat shard."""
        if self.split is None:
            return (-(-prod(self.shape) // self.replicas),)
        shape = list(self.shape)
        shape[self.split] //= self.replicas
        return tuple(shape)

    @property
    def piece_size(self) -> int:
        return prod(self.piece_shape)

    def to_replica_shards(self, shard: jax.Array) -> jax.Array:
        """Turn [*shape] into [replicas, piece_size]; row r is replica r's result of a reduce-scatter."""
        if self.split is None:
            flat = shard.reshape(-1)
            return jnp.pad(flat, (0, self.replicas * self.piece_size - flat.size)).reshape(self.replicas, -1)
        return self._cut(shard.reshape(self.shape), self.split, self.replicas)

    def from_replica_shards(self, pieces: jax.Array) -> jax.Array:
        """Turn [replicas, piece_size] into [*shape]."""
        if self.split is None:
            return pieces.reshape(-1)[: prod(self.shape)].reshape(self.shape)
        return self._joined(pieces, self.split)

    def to_own_shards(self, shard: jax.Array) -> jax.Array:
        """Turn a device's shard under `opt_state` into [per_device, piece_size]: a row for each of its replicas."""
        if self.split is None:
            return self.to_replica_shards(shard)
        shape = list(self.shape)
        shape[self.split] //= self.replicas // self.per_device
        return self._cut(shard.reshape(shape), self.split, self.per_device)

    def from_own_shards(self, pieces: jax.Array) -> jax.Array:
        """Invert `to_own_shards`, of an array that the axis splits."""
        assert self.split is not None
        return self._joined(pieces, self.split)

    def _cut(self, shard: jax.Array, d: int, parts: int) -> jax.Array:
        cut = shard.reshape(*shard.shape[:d], parts, -1, *shard.shape[d + 1 :])
        return jnp.moveaxis(cut, d, 0).reshape(parts, -1)

    def _joined(self, pieces: jax.Array, d: int) -> jax.Array:
        shape = self.piece_shape
        parts = jnp.moveaxis(pieces.reshape(-1, *shape), 0, d)
        return parts.reshape(*shape[:d], -1, *shape[d + 1 :])

    def wrap(self, array: jax.Array):
        return NamedArray(array, tuple(axis.name for axis in self.axes)) if self.named else array


def leaves_of(tree: Tree, layout: Layout, axis: str, replicated: bool) -> list[ShardedLeaf]:
    """Return the arrays of a tree of named or plain arrays, in its order.

    - `axis`: the axis that is reduced, `replica` or `island`
    - `replicated`: whether the arrays have that axis (of a plain array, the first); it is left out
    """
    paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named)[0]
    leaves = []
    for path, array in paths:
        axes = array.axes if is_named(array) else tuple(Axis(f"dimension_{n}", s) for n, s in enumerate(array.shape))
        if replicated:
            axes = tuple(each for each in axes if each.name != axis) if is_named(array) else axes[1:]
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        leaves.append(_leaf(name, axes, is_named(array), layout, axis))
    return leaves


def _leaf(path: str, axes: tuple[Axis, ...], named: bool, layout: Layout, axis: str) -> ShardedLeaf:
    params, opt_state = layout.spec(axes, layout.params), layout.spec(axes, layout.opt_state)
    of_axes = layout.splits(axes, layout.params)
    shape = tuple(
        each.size // prod(layout.mesh.shape[name] for name in names) for each, names in zip(axes, of_axes, strict=True)
    )
    split = [place for place, names in enumerate(layout.splits(axes, layout.opt_state)) if axis in names]
    cut = (split[0] if split else None, layout.axis(axis).size, layout.per_device(axis))
    return ShardedLeaf(path, axes, named, params, opt_state, shape, *cut)
