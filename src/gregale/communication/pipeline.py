"""A pipeline of stages over the mesh axis `stage`: its schedule, and the loop over microbatches.

The movement is linear in the activations and depends only on the iteration's number, so its transpose needs no saved
values. Every array has the stage as its first dimension and lives on the mesh axis `stage`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from gregale.axes.gather import all_gather_weights, scattered
from gregale.axes.layout import BATCH, LAYERS, Layout, Tree, is_named, vmap_over
from gregale.axes.parameters import is_buffer, is_parameter, is_quantised
from gregale.errors import UserError, multiples_near
from gregale.model.adapters import factors_or_all
from gregale.model.execution import PROJECTIONS, Execution, LayerFunction
from gregale.model.kernels.operations import ATTENTION_NAME
from gregale.settings import Settings, setting, whole


class Item(NamedTuple):
    """The work of a stage in one iteration: a microbatch in its `repeat`-th pass through the stages."""

    microbatch: int
    repeat: int


@dataclass(frozen=True)
class Schedule:
    """A circular pipeline: each microbatch passes all stages `repeats` times.

    At iteration t stage s works on item n = t - F s, which is microbatch n mod M in repeat n div M, and idles if n is
    not one of the M R items. After M R + F (S - 1) iterations the last stage has finished the last item. Raises
    `UserError` for numbers that do not fit together.

    - `stages`: S, at least 2
    - `microbatches`: M, a multiple of S; at least F S, so that an item is back at stage 0 when its next repeat starts
    - `repeats`: R; stage s holds the layers of (0, s), (1, s), ... (R - 1, s)
    - `forwarding`: F, iterations from a stage's output to the next stage's use of it: 1, or 2 when forwarding is
      delayed so that the transfer runs beside the next iteration's compute
    """

    stages: int
    microbatches: int
    repeats: int = 1
    forwarding: int = 1

    def __post_init__(self):
        S, M, R, F = self.stages, self.microbatches, self.repeats, self.forwarding
        if S < 2:
            raise UserError(
                f"mesh.stage is {S}: a pipeline needs at least 2 stages. Set mesh.stage to 2 or more, or take "
                "`pipeline` out of the configuration."
            )
        if R < 1:
            raise UserError(f"pipeline.repeats is {R}: microbatches pass the stages at least once; use 1 or more.")
        if F not in (1, 2):
            raise UserError(f"forwarding is {F}: a stage's output is used 1 iteration later, or 2 if it is delayed.")
        if M < 1 or M % S:
            raise UserError(
                f"pipeline.microbatches is {M}, which is not a multiple of mesh.stage {S}: each stage keeps "
                f"{M} / {S} = {M / S:.4g} microbatches. pipeline.microbatches {multiples_near(M, S)} would work."
            )
        if M < F * S:
            raise UserError(
                f"pipeline.microbatches is {M} with delayed forwarding and mesh.stage {S}: an output takes {F} "
                f"iterations to the next stage, so {F} x {S} = {F * S} microbatches must be on their way. Set "
                f"pipeline.microbatches to {F * S} or more, or pipeline.delay_forwarding to false."
            )

    @property
    def items(self) -> int:
        """Return M R: the items of each stage."""
        return self.microbatches * self.repeats

    @property
    def drain(self) -> int:
        """Return F (S - 1): iterations until the last stage has finished after the first."""
        return self.forwarding * (self.stages - 1)

    @property
    def iterations(self) -> int:
        """Return T = M R + F (S - 1)."""
        return self.items + self.drain

    @property
    def bubble(self) -> float:
        """Return the fraction of the iterations in which a stage idles: F (S - 1) / T."""
        return self.drain / self.iterations

    @property
    def columns(self) -> int:
        """Return M / S: microbatches whose inputs, and later outputs, each stage keeps."""
        return self.microbatches // self.stages

    @property
    def waiting(self) -> int:
        """Return the iterations that the last stage's output waits at stage 0 for its next repeat: M - F S."""
        return self.microbatches - self.forwarding * self.stages if self.repeats > 1 else 0

    def item(self, stage: int, iteration: int) -> Item | None:
        n = iteration - self.forwarding * stage
        return Item(n % self.microbatches, n // self.microbatches) if 0 <= n < self.items else None

    @property
    def uses(self) -> np.ndarray:
        """Return whether a stage uses a repeat's weights in an iteration for one of its items: [iteration, repeat,
        stage].
        """
        n = self.item_numbers(np.arange(self.iterations)[:, None])
        used = (n >= 0) & (n < self.items)
        return used[:, None] & (n[:, None] // self.microbatches == np.arange(self.repeats)[:, None])

    def item_numbers(self, iteration):
        """Return n = t - F s of every stage, [stage]; `iteration` may be traced. Stages with n < 0 or n >= `items`
        idle.
        """
        return iteration - self.forwarding * np.arange(self.stages, dtype=np.int32)

    def microbatch_numbers(self, iteration):
        """Return the microbatch of every stage, [stage], in [0, M) for idle stages too."""
        return self.item_numbers(iteration) % self.microbatches

    def repeat_numbers(self, iteration):
        """Return the repeat of every stage, [stage], in [0, R) for idle stages too."""
        return (self.item_numbers(iteration) // self.microbatches).clip(0, self.repeats - 1)

    def uses_next(self, iteration):
        """Return which window slot every stage uses, [stage]: true for `w_next`, false for `w_now`.

        In the M iterations of repeat r the slot `w_next` holds the weights of repeat r, and `w_now` those of r - 1. A
        stage uses the repeat of its own item. A stage that has not begun takes `w_next`, since `w_now` is still empty.
        In the drain (iterations from M R on) no item is of the repeat R, and all stages take `w_now`.
        """
        n, repeat = self.item_numbers(iteration), iteration // self.microbatches
        return (n // self.microbatches == repeat) & (repeat < self.repeats) | (n < 0)

    def layers_per_stage(self, layers: int) -> int:
        """Return l = layers / (S R); raise `UserError` if that is not a whole number."""
        groups = self.stages * self.repeats
        if layers % groups or not layers:
            fitting = [str(r) for r in range(1, layers + 1) if layers % (self.stages * r) == 0]
            repeats = f", or pipeline.repeats {' or '.join(fitting)}" if fitting else ""
            raise UserError(
                f"model.layers is {layers}: mesh.stage {self.stages} x pipeline.repeats {self.repeats} = {groups} "
                f"groups of layers, and {layers} / {groups} = {layers / groups:.4g} is not a whole number of layers. "
                f"model.layers {multiples_near(layers, groups)} would work{repeats}."
            )
        return layers // groups

    def picture(self, max_iterations: int = 32) -> str:
        """Draw stage against iteration: each microbatch, with a letter for its repeat; `.` is a bubble.

        `3b` is microbatch 3 in its second repeat. Of a longer schedule the first and the last iterations are shown.
        """
        shown: list[int | None] = list(range(self.iterations))
        if self.iterations > max_iterations:
            half = max_iterations // 2
            shown = [*range(half), None, *range(self.iterations - half, self.iterations)]
        rows = [["iteration", *("..." if t is None else str(t) for t in shown)]]
        for stage in range(self.stages):
            cells = ["..." if t is None else _cell(self.item(stage, t)) for t in shown]
            rows.append([f"stage {stage}", *cells])
        first = max(len(row[0]) for row in rows)
        width = max(len(cell) for row in rows for cell in row[1:])
        return "\n".join(
            " ".join([row[0].ljust(first), *(cell.rjust(width) for cell in row[1:])]).rstrip() for row in rows
        )


def _cell(item: Item | None) -> str:
    if item is None:
        return "."
    letters = "abcdefghijklmnopqrstuvwxyz"
    return f"{item.microbatch}{letters[item.repeat] if item.repeat < len(letters) else f':{item.repeat}'}"


# Names of the transfers between stages in a compiled program's metadata and in a profile.
IO, OUTPUTS = "pipeline_io", "pipeline_outputs"


class Loop(NamedTuple):
    """The loop state; microbatch m of `io` enters at (m div (M/S), m mod (M/S))."""

    io: jax.Array  # [stage, M / S, ...] inputs, replaced by the outputs
    shift: jax.Array  # [stage, ...] each stage's input from the stage before it; for stage 0 from the last
    held: jax.Array | None  # [stage, ...] outputs in transfer with delayed forwarding
    waiting: jax.Array | None  # [stage, M - F S, ...] the last stage's outputs until the next repeat


def started(io: jax.Array, schedule: Schedule) -> Loop:
    """Return the state before the first iteration.

    Stages that have not begun compute too. They use real inputs instead of zeros, at which a layer's derivative may not
    be finite. Their results reach no output.
    """
    idle = jax.lax.stop_gradient(io[:, 0])
    waits = schedule.waiting
    waiting = jnp.zeros((io.shape[0], waits, *io.shape[2:]), io.dtype) if waits else None
    return Loop(io, idle, idle if schedule.forwarding == 2 else None, waiting)


def stage_inputs(loop: Loop, t: jax.Array, schedule: Schedule) -> jax.Array:
    """Return the inputs of the stages in iteration t: [stage, ...].

    Stage 0 takes a new microbatch while there are any, then the waiting outputs; the others take the input from the
    stage before them.
    """
    entering = _column(loop.io, t % schedule.columns)
    back = loop.shift if loop.waiting is None else _column(loop.waiting, t % schedule.waiting)
    return jnp.where(_is_stage(0, back), jnp.where(t < schedule.microbatches, entering, back), loop.shift)


def advanced(loop: Loop, outputs: jax.Array, t: jax.Array, schedule: Schedule) -> Loop:
    """Return the state after iteration t, in which the stages return `outputs` [stage, ...].

    The outputs move one stage on. The column of `io` that was read moves one stage towards stage 0, and the last
    stage's output enters at its end. The input of stage 0 replaces the slot of `waiting` that was read.
    """
    column = t % schedule.columns
    with jax.named_scope(IO):
        moved = jnp.roll(_column(loop.io, column), -1, axis=0)
    io = _with_column(loop.io, column, jnp.where(_is_stage(schedule.stages - 1, outputs), outputs, moved))
    waiting = loop.waiting
    if waiting is not None:
        waiting = _with_column(waiting, t % schedule.waiting, loop.shift)
    sent, held = (outputs, None) if loop.held is None else (loop.held, outputs)
    with jax.named_scope(OUTPUTS):
        shift = jnp.roll(sent, 1, axis=0)
    return Loop(io, shift, held, waiting)


def finished(loop: Loop, schedule: Schedule) -> jax.Array:
    """Return the outputs [stage, M / S, ...] after the last iteration, each at the index of its input.

    An output enters F (S - 1) iterations after its input left, so many columns further on.
    """
    return jnp.roll(loop.io, -schedule.drain, axis=1)


def unfinished(outputs: jax.Array, schedule: Schedule) -> Loop:
    """Transpose `finished`: return the cotangent of the last state, of which only the outputs are used."""
    one, waits = jnp.zeros_like(outputs[:, 0]), schedule.waiting
    waiting = jnp.zeros((outputs.shape[0], waits, *outputs.shape[2:]), outputs.dtype) if waits else None
    held = one if schedule.forwarding == 2 else None
    return Loop(jnp.roll(outputs, schedule.drain, axis=1), one, held, waiting)


def advanced_transpose(after: Loop, t: jax.Array, schedule: Schedule) -> tuple[Loop, jax.Array]:
    """Return cotangents of the state before iteration t and of its outputs, from that of the state after it.

    It is explicit because JAX's transpose of a roll takes two transfers between stages.
    """
    column = t % schedule.columns
    ct = _column(after.io, column)
    is_last = _is_stage(schedule.stages - 1, ct)
    outputs = jnp.where(is_last, ct, 0)
    with jax.named_scope(IO):
        moved = jnp.roll(jnp.where(is_last, 0, ct), 1, axis=0)
    io = _with_column(after.io, column, moved)
    shift, waiting = jnp.zeros_like(outputs), after.waiting
    if waiting is not None:
        slot = t % schedule.waiting
        shift, waiting = _column(waiting, slot), _with_column(waiting, slot, shift)
    with jax.named_scope(OUTPUTS):
        sent = jnp.roll(after.shift, -1, axis=0)
    if after.held is None:
        return Loop(io, shift, None, waiting), outputs + sent
    return Loop(io, shift, sent, waiting), outputs + after.held


def stage_inputs_transpose(before: Loop, inputs: jax.Array, t: jax.Array, schedule: Schedule) -> Loop:
    """Return `before`, the cotangent of the state, plus the contribution of the stage inputs' cotangent."""
    is_first, entering = _is_stage(0, inputs), t < schedule.microbatches
    first, others = jnp.where(is_first, inputs, 0), jnp.where(is_first, 0, inputs)
    io = _with_column_added(before.io, t % schedule.columns, jnp.where(entering, first, 0))
    back = jnp.where(entering, 0, first)
    shift, waiting = before.shift + others, before.waiting
    if waiting is None:
        return Loop(io, shift + back, before.held, None)
    return Loop(io, shift, before.held, _with_column_added(waiting, t % schedule.waiting, back))


def _is_stage(stage: int, like: jax.Array) -> jax.Array:
    """Return whether an element of an array [stage, ...] is of this stage; broadcasts against it."""
    return jnp.arange(like.shape[0]).reshape(-1, *[1] * (like.ndim - 1)) == stage


def _column(array: jax.Array, column: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(array, column, axis=1, keepdims=False)


def _with_column(array: jax.Array, column: jax.Array, value: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(array, value, column, axis=1)


def _with_column_added(array: jax.Array, column: jax.Array, value: jax.Array) -> jax.Array:
    return _with_column(array, column, _column(array, column) + value)


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
    layout: Layout  # see `gregale.communication.pipeline.loop_layout`
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
        return all_gather_weights(weights, self.layout, self.dtype) if level == self.level else weights

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


# The values, by the layer's names, that an iteration keeps for the backward pass beside the stages' inputs.
# `attention` is the older name of `context`.
SAVED: dict[str, tuple[str, ...]] = {
    "full": (),
    "context": (ATTENTION_NAME,),
    "attention": (ATTENTION_NAME,),
    "projections": tuple(PROJECTIONS),
}


@dataclass(frozen=True)
class PipelineConfig(Settings):
    """The pipeline of layers over the mesh axis `stage`; it changes the model's results only by rounding."""

    repeats: int = setting(1, "passes of a microbatch", range=whole(1, 100_000))
    microbatches: int | None = setting(None, "in it at a time; null: as few as possible", range=whole(1))
    delay_forwarding: bool = setting(False, "hand on an iteration later, behind compute")
    gather: str = setting("per_repeat", "when weights are gathered", choices=GATHER_LEVELS)
    remat: str = setting("full", "saved by name", choices=tuple(SAVED))

    def schedule(self, stages: int) -> Schedule:
        """Return the schedule for a number of stages; raise `UserError` if the numbers do not fit together."""
        forwarding = 2 if self.delay_forwarding else 1
        microbatches = forwarding * stages if self.microbatches is None else self.microbatches
        return Schedule(stages, microbatches, self.repeats, forwarding)


def pipelined_execution(config: PipelineConfig, execution: Execution) -> Execution:
    """Return the execution that runs a model's stack of layers through the pipeline, otherwise unchanged."""
    layout = execution.layout
    schedule = config.schedule(layout.mesh.shape[STAGE])
    pipeline = Pipeline(schedule, layout, config.gather, SAVED[config.remat], execution.dtype, factors_or_all)
    execution = replace(execution, splits_stream=False)
    inside = replace(execution, layout=pipeline.inside, weights_ready=True)

    def stack(block: LayerFunction, x: NamedArray, weights: Any, rows: Any) -> tuple[NamedArray, Any]:
        return pipelined(lambda x, weights, rows: block(x, weights, rows, inside), weights, x, rows, pipeline)

    return replace(execution, stack=stack)
