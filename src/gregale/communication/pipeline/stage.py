"""The compute of one iteration: all stages at once, each on its own microbatch, and its transpose."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from gregale.axes.layout import Layout, Tree, is_named, vmap_over
from gregale.axes.parameters import is_quantised
from gregale.communication.pipeline.schedule import Schedule

Layer = Callable[[NamedArray, Tree, Tree], tuple[NamedArray, Tree]]
"""layer(x [batch, ...], weights of one layer, extras [batch, ...]) -> x, and sums over its rows, float32"""

REPEAT, STAGE, LAYER = "repeat", "stage", "layer"
DATA = "data"  # the devices that share a replica's rows, as an axis of the arrays


def loop_layout(layout: Layout) -> Layout:
    """Return the layout of a pipeline's arrays: `stage` and `data` are axes of the arrays themselves.

    Rows are split by the array axis `data` rather than by `batch`, so that each device has its own addend of a weight's
    gradient and the pipeline decides when to sum them. (Otherwise the partitioner sums them in every iteration.)
    """
    inside = layout.inside(DATA).inside(STAGE)
    own = {STAGE: STAGE, DATA: DATA}
    return replace(layout, compute={**inside.compute, **own}, params={**layout.inside(STAGE).params, **own})


def is_whole(leaf) -> bool:
    """Return whether a leaf is one weight: a named array, or those of a quantised weight."""
    return is_named(leaf) or is_quantised(leaf)


class Fixed(NamedTuple):
    """The inputs of layers that are not differentiated."""

    extras: Tree  # [microbatch, data, batch, ...], travel with their rows
    constants: Tree  # [repeat, stage, layer, ...], stay with their layers; None where the tree of weights has a weight


@dataclass(frozen=True)
class Stages:
    """The compute of the stages in an iteration."""

    layer: Layer  # one layer of the stack
    schedule: Schedule
    layout: Layout  # see `loop_layout`
    saved: tuple[str, ...]  # names of the values that the forward pass keeps for the backward pass
    trained: Callable[[Tree], Tree]  # the weights of a tree that have gradients, None in place of the others

    def forward(
        self, weights: Tree, x: NamedArray, fixed: Fixed, t: jax.Array
    ) -> tuple[NamedArray, Tree, list[jax.Array]]:
        """Return the outputs of all stages, their layers' sums [stage, data, layer, ...], and the values kept by name.

        - `weights`: gathered, [stage, layer, ...]
        - `x`: [stage, data, batch, ...]
        """

        def one(weights, x, fixed):
            (y, sums), pullback = jax.vjp(self._stage(), weights, x, fixed)
            return y, sums, pullback.opaque_residuals

        y, sums, kept = self._everywhere(one)(weights, x, self._at(fixed, t))
        return self.layout.constrain(y, self.layout.compute), self.layout.constrain(sums, self.layout.compute), kept

    def backward(self, weights: Tree, x: NamedArray, fixed: Fixed, t: jax.Array, kept: list[jax.Array], cts: tuple):
        """Return cotangents (of trained weights, float32 [stage, data, layer, ...]; of `x`).

        - `cts`: those of the outputs, and of the sums [stage, layer, ...]

        Each device's addend of the weights' gradient stays separate: nothing is summed over `data`.
        """

        def one(weights, x, fixed, kept, cts):
            # The forward pass in this trace is dead code except for values that are not kept.
            _, pullback = jax.vjp(self._stage(), weights, x, fixed)
            pullback.opaque_residuals = kept
            ct_weights, ct_x, _ = pullback(cts)
            return jax.tree.map(lambda g: g.astype(jnp.float32), self.trained(ct_weights)), ct_x

        ct_weights, ct_x = self._everywhere(one)(weights, x, self._at(fixed, t), kept, cts)
        return self.layout.constrain(ct_weights, self.layout.compute), self.layout.constrain(ct_x, self.layout.compute)

    def _stage(self) -> Callable:
        """Return all layers of a stage for one repeat; only its arguments and the `saved` values are kept."""

        def stage(weights: Tree, x: NamedArray, fixed: Fixed) -> tuple[NamedArray, Tree]:
            def layer(x, weights):
                y, sums = self.layer(x, weights, fixed.extras)
                return y.rearrange(x.axes), sums

            weights = eqx.combine(self.trained(weights), jax.lax.stop_gradient(weights), is_leaf=is_named)
            return hax.scan(layer, LAYER)(x, eqx.combine(weights, fixed.constants, is_leaf=is_whole))

        policy = jax.checkpoint_policies.save_only_these_names(*self.saved)
        return jax.checkpoint(stage, policy=policy, prevent_cse=False)

    def _everywhere(self, function: Callable) -> Callable:
        return vmap_over(vmap_over(function, DATA, self.layout), STAGE, self.layout)

    def _at(self, fixed: Fixed, t: jax.Array) -> Fixed:
        """Return the extras of each stage's current microbatch, and the constants of its repeat's layers.

        [stage, data, batch, ...] and [stage, layer, ...].
        """
        microbatches, repeats = self.schedule.microbatch_numbers(t), self.schedule.repeat_numbers(t)
        stages = np.arange(self.schedule.stages)

        def placed(array: jax.Array, names: tuple) -> NamedArray:
            return self.layout.constrain(NamedArray(array, names), self.layout.compute)

        def of_rows(leaf: NamedArray) -> NamedArray:
            return placed(leaf.array[microbatches], (STAGE, *leaf.axis_names[1:]))

        def of_layers(leaf: NamedArray) -> NamedArray:
            return placed(leaf.array[repeats, stages], leaf.axis_names[1:])

        return Fixed(
            jax.tree.map(of_rows, fixed.extras, is_leaf=is_named),
            jax.tree.map(of_layers, fixed.constants, is_leaf=is_named),
        )
