"""One iteration's compute: all stages at once, each on its own microbatch, and its transpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from gregale.axes.layout import Layout, is_named, vmap_over
from gregale.communication.pipeline_schedule import Schedule

Tree = Any
Layer = Callable[[NamedArray, Tree, Tree], NamedArray]
"""layer(x [batch, ...], weights of one layer, extras [batch, ...]) -> x"""

REPEAT, STAGE, LAYER = "repeat", "stage", "layer"
DATA = "data"  # the devices that share a replica's rows, as an axis of the arrays


def loop_layout(layout: Layout) -> Layout:
    """The layout of what a pipeline computes with: `stage` and `data` are axes of the arrays themselves.

    Rows are split by the array axis `data` rather than by `batch`, so that each device has its own addend of a
    weight's gradient and it is the pipeline that decides when they are added up. (Otherwise the partitioner adds them
    up in every iteration.)
    """
    inside = layout.inside(DATA).inside(STAGE)
    own = {STAGE: STAGE, DATA: DATA}
    return replace(layout, compute={**inside.compute, **own}, params={**layout.inside(STAGE).params, **own})


@dataclass(frozen=True)
class Stages:
    """What the stages compute in an iteration.

    - `layer`: one layer of the stack
    - `layout`: see `loop_layout`
    - `saved`: names of the values that the forward pass keeps for the backward pass
    """

    layer: Layer
    schedule: Schedule
    layout: Layout
    saved: tuple[str, ...]

    def forward(self, weights: Tree, x: NamedArray, extras: Tree, t: jax.Array) -> tuple[NamedArray, list[jax.Array]]:
        """The outputs of all stages, and what is kept by name for `backward`.

        Arguments:
        - `weights`: gathered, [stage, layer, ...]
        - `x`: [stage, data, batch, ...]
        - `extras`: [microbatch, data, batch, ...]
        """

        def one(weights, x, extras):
            y, pullback = jax.vjp(self._stage(), weights, x, extras)
            return y, pullback.opaque_residuals

        y, kept = self._everywhere(one)(weights, x, self._extras_at(extras, t))
        return self.layout.constrain(y, self.layout.compute), kept

    def backward(self, weights: Tree, x: NamedArray, extras: Tree, t: jax.Array, kept: list[jax.Array], ct: NamedArray):
        """Cotangents (of the weights, float32 [stage, data, layer, ...]; of `x`), from that of the outputs.

        Each device's addend of the weights' gradient stands alone: nothing is added up over `data`.
        """

        def one(weights, x, extras, kept, ct):
            # The forward pass that this traces is dead code but for what is not kept.
            _, pullback = jax.vjp(self._stage(), weights, x, extras)
            pullback.opaque_residuals = kept
            ct_weights, ct_x, _ = pullback(ct)
            return jax.tree.map(lambda g: g.astype(jnp.float32), ct_weights), ct_x

        ct_weights, ct_x = self._everywhere(one)(weights, x, self._extras_at(extras, t), kept, ct)
        return self.layout.constrain(ct_weights, self.layout.compute), self.layout.constrain(ct_x, self.layout.compute)

    def _stage(self) -> Callable:
        """All layers of a stage for one repeat; of its values only its arguments and those `saved` are kept."""

        def stage(weights: Tree, x: NamedArray, extras: Tree) -> NamedArray:
            def layer(x, weights):
                return self.layer(x, weights, extras).rearrange(x.axes)

            return hax.fold(layer, LAYER)(x, weights)

        policy = jax.checkpoint_policies.save_only_these_names(*self.saved)
        return jax.checkpoint(stage, policy=policy, prevent_cse=False)

    def _everywhere(self, function: Callable) -> Callable:
        return vmap_over(vmap_over(function, DATA, self.layout), STAGE, self.layout)

    def _extras_at(self, extras: Tree, t: jax.Array) -> Tree:
        """The extras of the microbatch that each stage works on: [stage, data, batch, ...]."""
        numbers = self.schedule.microbatch_numbers(t)

        def one(leaf: NamedArray) -> NamedArray:
            taken = NamedArray(jnp.take(leaf.array, numbers, axis=0), (STAGE, *leaf.axis_names[1:]))
            return self.layout.constrain(taken, self.layout.compute)

        return jax.tree.map(one, extras, is_leaf=is_named)
