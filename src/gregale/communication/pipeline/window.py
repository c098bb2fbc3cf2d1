"""The pipeline's window of two slots for gathered weights, and the reduction of their gradients."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from haliax import NamedArray

from gregale.axes.gather import gathered, scattered
from gregale.axes.layout import Layout, Tree, is_named
from gregale.communication.pipeline.schedule import Schedule
from gregale.communication.pipeline.stage import DATA, REPEAT

GATHER_LEVELS = ("per_repeat", "per_iteration", "once")
GatherLevel = str


class Slots(NamedTuple):
    """The weights of two repeats, each [stage, layer, ...]."""

    now: Tree
    next: Tree


@dataclass(frozen=True)
class Window:
    """Gathers weights over `data` at a given level of the pipeline, and reduces their gradients.

    The level `once` gathers all weights before the first repeat, `per_repeat` one repeat's when its slot is filled, and
    `per_iteration` the weights in use in every iteration.
    """

    level: GatherLevel
    schedule: Schedule
    layout: Layout  # see `gregale.communication.pipeline.stage.loop_layout`
    dtype: jnp.dtype  # of gathered weights, and of gradients on the wire

    def ready(self, weights: Tree) -> Tree:
        """Return [repeat, stage, layer, ...], gathered if the level is `once`."""
        return self._gathered("once", weights)

    def filled(self, weights: Tree, repeat: jax.Array | int) -> Tree:
        """Return a slot for one repeat, [stage, layer, ...]; gathered if the level is `per_repeat`."""

        def one(leaf: NamedArray) -> NamedArray:
            array = jax.lax.dynamic_index_in_dim(leaf.array, repeat, axis=0, keepdims=False)
            return NamedArray(array, leaf.axis_names[1:])

        return self._gathered("per_repeat", jax.tree.map(one, weights, is_leaf=is_named))

    def empty(self, weights: Tree) -> Tree:
        """Return an empty slot."""
        shapes = jax.eval_shape(lambda: self.filled(weights, 0))
        mapping = self.layout.params if self.level == "per_iteration" else self.layout.compute
        return self.layout.constrain(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), mapping)

    def used(self, slots: Slots, t: jax.Array) -> Tree:
        """Return the weights that each stage uses in iteration t, gathered."""
        uses_next = self.schedule.uses_next(t)
        chosen = jax.tree.map(lambda now, new: jnp.where(_like(uses_next, now), new, now), slots.now, slots.next)
        return self._gathered("per_iteration", chosen)

    def added(self, sums: Slots, cotangent: Tree, t: jax.Array) -> Slots:
        """Return the sums of each slot's cotangents, plus that of iteration t."""
        uses_next = self.schedule.uses_next(t)
        return Slots(
            jax.tree.map(lambda a, g: a + jnp.where(_like(uses_next, g), 0, g), sums.now, cotangent),
            jax.tree.map(lambda a, g: a + jnp.where(_like(uses_next, g), g, 0), sums.next, cotangent),
        )

    def reduced(self, level: GatherLevel, cotangent: Tree) -> Tree:
        """Transpose the gather, if it is done at `level`: sum over `data`, under `params`.

        One reduce-scatter over `data` for each array that `params` splits by it, one all-reduce for others.
        """
        if level != self.level:
            return cotangent
        return jax.tree.map(self._reduced, cotangent, is_leaf=is_named)

    def no_cotangent(self, slot: Tree) -> Tree:
        """Return zero cotangents of a slot: with an axis `data`, unless each iteration reduces them."""
        own = self.level != "per_iteration"
        size = self.layout.axis(DATA).size

        def one(leaf: NamedArray) -> NamedArray:
            stage, *rest = leaf.array.shape
            shape = (stage, size, *rest) if own else (stage, *rest)
            first, *names = leaf.axis_names
            return NamedArray(jnp.zeros(shape, jnp.float32), (first, DATA, *names) if own else leaf.axis_names)

        mapping = self.layout.compute if own else self.layout.params
        return self.layout.constrain(jax.tree.map(one, slot, is_leaf=is_named), mapping)

    def _gathered(self, level: GatherLevel, weights: Tree) -> Tree:
        return gathered(weights, self.layout, self.dtype) if level == self.level else weights

    def _reduced(self, leaf: NamedArray) -> NamedArray:
        place = leaf.axis_names.index(DATA)
        axes = tuple(axis for axis in leaf.axes if axis.name != DATA)

        def add(addend: jax.Array) -> jax.Array:
            return scattered(jnp.squeeze(addend, place), axes, (DATA,), self.layout)

        before, after = self.layout.spec(leaf.axes, self.layout.compute), self.layout.spec(axes, self.layout.params)
        array = self.layout.shard_map(add, before, after)(leaf.array.astype(self.dtype))
        return NamedArray(array, tuple(axis.name for axis in axes))


def with_repeats(stacked: Tree) -> Tree:
    """Name the first dimension that a scan over repeats has given to a tree of named arrays."""
    return jax.tree.map(lambda leaf: NamedArray(leaf.array, (REPEAT, *leaf.axis_names)), stacked, is_leaf=is_named)


def _like(of_stage: jax.Array, array: jax.Array) -> jax.Array:
    return of_stage.reshape(-1, *[1] * (array.ndim - 1))
