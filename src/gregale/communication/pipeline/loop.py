"""The state of a pipeline between iterations, and its movement between the stages.

The movement is linear in the activations and depends only on the iteration's number, so its transpose needs no saved
values. Every array has the stage as its first dimension and lives on the mesh axis `stage`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gregale.communication.pipeline.schedule import Schedule

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
