"""The pipelined layer stack: a scan over layers, computed by stages that all work at the same time."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from gregale.axes.layout import BATCH, LAYERS, Layout, Tree, is_named
from gregale.axes.parameters import is_buffer, is_parameter, is_quantised
from gregale.communication.pipeline.loop import (
    Loop,
    advanced,
    advanced_transpose,
    finished,
    stage_inputs,
    stage_inputs_transpose,
    started,
    unfinished,
)
from gregale.communication.pipeline.schedule import Schedule
from gregale.communication.pipeline.stage import DATA, LAYER, REPEAT, STAGE, Fixed, Layer, Stages, is_whole, loop_layout
from gregale.communication.pipeline.window import GatherLevel, Slots, Window, with_repeats
from gregale.errors import UserError, multiples_near

MICROBATCH = "microbatch"


@dataclass(frozen=True)
class Pipeline:
    """The settings of a pipelined stack of layers.

    An iteration keeps the stages' inputs for the backward pass, and the values named by `saved`
    (`jax.ad_checkpoint.checkpoint_name`); it recomputes others.
    """

    schedule: Schedule
    layout: Layout  # mesh and mappings as one replica sees them
    gather: GatherLevel = "per_repeat"  # of weights over `data`: also `per_iteration`, or `once` for the whole pass
    saved: tuple[str, ...] = ()
    dtype: jnp.dtype = jnp.float32  # of gathered weights
    # the weights of a tree of layers that have gradients, None in place of the others, which are gathered alone
    trained: Callable[[Tree], Tree] = field(default=lambda weights: weights)

    @property
    def inside(self) -> Layout:
        """Return the layout of a layer: nothing maps to `stage` and `data`."""
        return self.layout.inside(STAGE).inside(DATA)


def pipelined(
    layer: Layer, weights: Tree, inputs: NamedArray, extras: Tree, pipeline: Pipeline
) -> tuple[NamedArray, Tree]:
    """Return the output of the last layer, and the layers' sums over all rows, [layers, ...].

        x, sums[i] = layer(x, weights[i], extras)   for every i along `layers`

    In each iteration all stages work, each on its own microbatch and with the weights of its own repeat. The backward
    pass is written by hand: the forward pass keeps each iteration's stage inputs (and what is `saved` by name) and
    never a gathered weight but the last slot; a repeat's gradient is one buffer that is reduced over `data` once.
    Raises `UserError` if the schedule does not divide the layers or the rows.

    - `layer`: (x [batch, ...], weights of one layer, extras [batch, ...]) -> x, sums; it runs on one device's rows of a
      microbatch, with gathered weights, under `pipeline.inside`; its closure has no differentiated values. The sums are
      a tree of named arrays, float32, each a sum over these rows
    - `weights`: named arrays with an axis `layers`, in the plain order of the model; quantised ones, which `layer`
      decodes, are not cast. Buffers, and those that are not floats (a layer's number, its window), are constants of
      their layers: neither cast nor gathered nor differentiated
    - `inputs`: [batch, ...]
    - `extras`: named arrays [batch, ...] that travel with their rows (positions, segment ids);
      they are not differentiated
    """
    schedule, layout = pipeline.schedule, loop_layout(pipeline.layout)
    inputs = inputs.rearrange((BATCH, ...))
    parts = _in_parts(inputs, schedule, layout)
    run = _Run(
        schedule=schedule,
        stages=Stages(layer, schedule, layout, pipeline.saved, pipeline.trained),
        window=Window(pipeline.gather, schedule, layout, pipeline.dtype),
        names=(STAGE, *parts.axis_names[1:]),
    )
    extras = jax.tree.map(lambda leaf: _in_parts(leaf, schedule, layout), extras, is_leaf=is_named)
    weights, constants = eqx.partition(weights, _is_weight, is_leaf=lambda leaf: is_whole(leaf) or is_buffer(leaf))
    fixed = Fixed(layout.constrain(extras, layout.compute), layout.constrain(_grouped(constants, schedule), {}))
    io = parts.array.reshape(schedule.stages, schedule.columns, *parts.array.shape[1:])
    out, sums = run(_by_stage(weights, pipeline), io, fixed)
    whole = NamedArray(jnp.moveaxis(out, 2, 0).reshape(inputs.array.shape), inputs.axis_names)
    sums = jax.tree.map(lambda leaf: leaf.flatten_axes((REPEAT, STAGE, LAYER), LAYERS), sums, is_leaf=is_named)
    return pipeline.layout.constrain((whole, sums), pipeline.layout.compute)


@dataclass(frozen=True)
class _Run:
    """The pass through the pipeline; `names`: of the axes of its inputs and outputs, [stage, data, batch, ...]."""

    schedule: Schedule
    stages: Stages
    window: Window
    names: tuple[str, ...]

    def __call__(self, weights: Tree, io: jax.Array, fixed: Fixed) -> tuple[jax.Array, Tree]:
        run = jax.custom_vjp(lambda weights, io, fixed: self.forward(weights, io, fixed)[0])
        run.defvjp(self.forward, self.backward)
        return run(weights, io, fixed)

    def forward(self, weights: Tree, io: jax.Array, fixed: Fixed):
        """Return outputs [stage, M / S, data, batch, ...] and sums [repeat, stage, layer, ...], and the residuals."""
        schedule, window = self.schedule, self.window
        M, R = schedule.microbatches, schedule.repeats
        ready = window.ready(weights)

        def iteration(slots: Slots, loop: Loop, t: jax.Array):
            x = self._named(stage_inputs(loop, t, schedule))
            y, sums, kept = self.stages.forward(window.used(slots, t), x, fixed, t)
            return advanced(loop, y.array, t, schedule), ((x, kept), sums)

        def repeat(carry, r: jax.Array):
            now, loop = carry
            slots = Slots(now, window.filled(ready, r))
            loop, outs = jax.lax.scan(partial(iteration, slots), loop, r * M + jnp.arange(M))
            return (slots.next, loop), outs

        start = (window.empty(ready), started(io, schedule))
        (last, loop), (kept, sums) = jax.lax.scan(repeat, start, jnp.arange(R))
        drain = jax.lax.scan(partial(iteration, Slots(last, last)), loop, self._drain())
        loop, (kept_in_drain, sums_in_drain) = drain
        sums = jax.tree.map(self._summed, sums, sums_in_drain, is_leaf=is_named)
        return (finished(loop, schedule), sums), (ready, fixed, last, kept, kept_in_drain)

    def backward(self, residuals, cts: tuple[jax.Array, Tree]):
        """Return cotangents of trained weights and the inputs; frozen weights and fixed values have none.

        In reverse, the use of repeat r's weights as `now` ends with repeat r + 1; they leave as `next` of repeat r. So
        each repeat gathers one slot, of repeat r - 1, and reduces one, of repeat r.
        """
        schedule, window = self.schedule, self.window
        M, R = schedule.microbatches, schedule.repeats
        ready, fixed, last, kept, kept_in_drain = residuals
        ct_outputs, ct_sums = cts

        def iteration(slots: Slots, carry, at):
            (ct_loop, sums), (t, (x, kept)) = carry, at
            ct_loop, ct_y = advanced_transpose(ct_loop, t, schedule)
            used = window.used(slots, t)
            cts = self._named(ct_y), jax.tree.map(partial(self._summed_transpose, t), ct_sums, is_leaf=is_named)
            ct_weights, ct_x = self.stages.backward(used, x, fixed, t, kept, cts)
            ct_loop = stage_inputs_transpose(ct_loop, ct_x.array, t, schedule)
            sums = window.added(sums, window.reduced("per_iteration", ct_weights), t)
            return (ct_loop, sums), None

        def repeat(carry, at):
            (next_slot, ct_next, ct_loop), (r, kept) = carry, at
            slots = Slots(window.filled(ready, jnp.maximum(r - 1, 0)), next_slot)
            sums = Slots(window.no_cotangent(self.stages.trained(slots.now)), ct_next)
            times = r * M + jnp.arange(M)
            (ct_loop, sums), _ = jax.lax.scan(partial(iteration, slots), (ct_loop, sums), (times, kept), reverse=True)
            return (slots.now, sums.now, ct_loop), window.reduced("per_repeat", sums.next)

        none = window.no_cotangent(self.stages.trained(last))
        start = (unfinished(ct_outputs, schedule), Slots(none, none))
        drain = (self._drain(), kept_in_drain)
        (ct_loop, sums), _ = jax.lax.scan(partial(iteration, Slots(last, last)), start, drain, reverse=True)
        start = (last, sums.now, ct_loop)
        (_, _, ct_loop), ct_weights = jax.lax.scan(repeat, start, (jnp.arange(R), kept), reverse=True)
        ct_weights = window.reduced("once", with_repeats(ct_weights))
        return jax.tree.map(lambda ct: ct.astype(window.dtype), ct_weights), ct_loop.io, None

    def _summed(self, found: NamedArray, in_drain: NamedArray) -> NamedArray:
        """Return the sums of all microbatches and devices, [repeat, stage, layer, ...].

        - `found`: [repeat, M, stage, data, layer, ...], of every iteration; `in_drain`: [iteration, stage, ...]
        """
        whole = jnp.concatenate([found.array.reshape(-1, *found.array.shape[2:]), in_drain.array])
        of_devices = jnp.einsum("trs,tsd...->rsd...", self.schedule.uses.astype(np.float32), whole)
        names = (REPEAT, STAGE, DATA, *in_drain.axis_names[2:])
        layout = self.stages.layout
        return hax.sum(layout.constrain(NamedArray(of_devices, names), layout.compute), DATA)

    def _summed_transpose(self, t: jax.Array, ct: NamedArray) -> NamedArray:
        """Return the cotangent of iteration t's sums on each device, [stage, layer, ...]; 0 for stages that idle."""
        used = jnp.asarray(self.schedule.uses, jnp.float32)[t]
        return NamedArray(jnp.einsum("rs,rs...->s...", used, ct.array), ct.axis_names[1:])

    def _drain(self) -> jax.Array:
        return jnp.arange(self.schedule.items, self.schedule.iterations)

    def _named(self, array: jax.Array) -> NamedArray:
        layout = self.stages.layout
        return layout.constrain(NamedArray(array, self.names), layout.compute)


def _in_parts(rows: NamedArray, schedule: Schedule, layout: Layout) -> NamedArray:
    """Turn [batch, ...] into [microbatch, data, batch / (data M), ...].

    A device cuts its own rows: the `compute` mapping splits them over `data` and then `stage`, so a stage keeps its own
    microbatches.
    """
    rows = rows.rearrange((BATCH, ...))
    devices, M = layout.axis(DATA).size, schedule.microbatches
    count, *rest = rows.array.shape
    if count % (devices * M):
        step = devices * M
        raise UserError(
            f"pipeline.microbatches is {M}: the {count} rows that go through the pipeline are shared by data {devices} "
            f"x pipeline.microbatches {M} = {step} parts, and {count} / {step} = {count / step:.4g} is not a whole "
            f"number of rows. {multiples_near(count, step)} rows would work, or another number of microbatches."
        )
    cut = rows.array.reshape(devices, M, count // (devices * M), *rest).swapaxes(0, 1)
    return NamedArray(cut, (MICROBATCH, DATA, *rows.axis_names))


def _by_stage(weights: Tree, pipeline: Pipeline) -> Tree:
    """Turn [layers, ...] into [repeat, stage, layer, ...] in the compute dtype, split over `data` only.

    An array that `params` splits over `stage` takes one all-to-all over `stage`.
    """
    plain, layout = pipeline.layout, loop_layout(pipeline.layout)

    def cast(leaf):
        return leaf if is_quantised(leaf) else leaf.astype(pipeline.dtype)

    def placed(leaf: NamedArray) -> NamedArray:
        return plain.constrain(leaf.rearrange((LAYERS, ...)), plain.params)

    weights = jax.tree.map(placed, jax.tree.map(cast, weights, is_leaf=is_whole), is_leaf=is_named)
    return layout.constrain(_grouped(weights, pipeline.schedule), layout.params)


def _is_weight(leaf) -> bool:
    return is_quantised(leaf) or (is_named(leaf) and is_parameter(leaf.array))


def _grouped(tree: Tree, schedule: Schedule) -> Tree:
    """Turn [layers, ...] into [repeat, stage, layer, ...]."""

    def one(leaf: NamedArray) -> NamedArray:
        leaf = leaf.rearrange((LAYERS, ...))
        per_stage = schedule.layers_per_stage(leaf.axes[0].size)
        axes = Axis(REPEAT, schedule.repeats), Axis(STAGE, schedule.stages), Axis(LAYER, per_stage)
        return leaf.unflatten_axis(LAYERS, axes)

    return jax.tree.map(one, tree, is_leaf=is_named)
