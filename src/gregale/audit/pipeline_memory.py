"""Provides the memory of a step with pipelined layers in closed form, as `audit.memory` for scanned layers."""

from dataclasses import replace

from gregale.audit.memory import (
    FLOAT32,
    Estimate,
    head_values,
    layer_activations,
    loss_bytes,
    saved_by_layer,
    values_of_a_layer,
)
from gregale.audit.step import Backend, PipelineShape, StepShape

# Slots of the window, a slot's gradient in float32 for each of them, and that of the iteration, in bytes of a value.
# With one repeat one slot is used; with `per_iteration` the slots are not gathered.
SLOTS, GRADIENTS, ITERATION = 2, 2, 1
COPIES = 4  # of the rows in the pipeline, if a stage holds several microbatches: inputs, outputs and both gradients


def estimate_pipeline(
    step: StepShape, pipeline: PipelineShape, arguments: int, backend: Backend, update: int = 0
) -> Estimate:
    """Return the memory of a PSDP step with pipelined layers in closed form; arguments as for `estimate_memory`.

    An iteration differentiates all layers of a stage for one microbatch of the pipeline, so that it holds what each of
    them saves without `remat`. The forward pass keeps the inputs of each iteration.
    """
    apart = step.microbatches > 1
    gradients = FLOAT32 * sum(step.gradient_values(weight, backend.lanes) for weight in step.weights)
    return Estimate(
        arguments=arguments,
        buffers=gradients if apart else 0,
        saved=_kept(step, pipeline, backend),
        tables=_weights(step, pipeline),
        working=max(_iteration(step, pipeline, backend), _loss(step, pipeline, backend)),
        update=update if apart else update + gradients,
    )


def of_an_iteration(step: StepShape, pipeline: PipelineShape) -> StepShape:
    """Return the step with the rows of one iteration: those of a microbatch of the pipeline, of all stages."""
    rows = step.rows * step.mesh["stage"] // pipeline.microbatches
    return replace(step, rows=rows, per_step=True, pipeline=None)


def layers_of_a_stage(step: StepShape, pipeline: PipelineShape) -> int:
    return step.layers // (step.mesh["stage"] * pipeline.repeats)


def _slot(step: StepShape, pipeline: PipelineShape) -> int:
    """Return the values of the gathered weights of one repeat."""
    return layers_of_a_stage(step, pipeline) * values_of_a_layer(step)


def _kept(step: StepShape, pipeline: PipelineShape, backend: Backend) -> int:
    """Return the bytes that iterations keep for the backward pass: inputs, and values of each layer by name.

    With several layers there is a copy of one iteration's, over which the backward pass scans.
    """
    one, layers = of_an_iteration(step, pipeline), layers_of_a_stage(step, pipeline)
    stream = one.tokens * one.embed * one.compute_bytes
    by_layer = saved_by_layer(one, backend) - stream
    return (pipeline.iterations + (layers > 1)) * (stream + layers * by_layer)


def _weights(step: StepShape, pipeline: PipelineShape) -> int:
    """Return the bytes of the weights of a stage's layers in all repeats, and of their gradients, between iterations."""
    if pipeline.gather == "once" and pipeline.repeats > 1:
        values = pipeline.repeats * _slot(step, pipeline)
    else:
        values = sum(step.on_device(weight, step.layout.params) for weight in step.stacked())
    return 2 * step.compute_bytes * values


def _iteration(step: StepShape, pipeline: PipelineShape, backend: Backend) -> int:
    """Return the bytes of an iteration's backward pass: slots, their gradients, and activations."""
    one, layers = of_an_iteration(step, pipeline), layers_of_a_stage(step, pipeline)
    width = max(step.compute_bytes, backend.narrowest_bytes)
    single = pipeline.repeats == 1 or pipeline.gather == "per_iteration"
    a_value = width + FLOAT32 if single else SLOTS * width + (GRADIENTS + ITERATION) * FLOAT32
    rows = step.tokens * step.embed * step.compute_bytes
    rows *= COPIES if pipeline.microbatches > step.mesh["stage"] else 1
    saved = layers * saved_by_layer(replace(one, remat="none"), backend)
    activations = layer_activations(one, backend)
    inside = saved + activations if layers > 1 else max(saved, activations)
    return a_value * _slot(step, pipeline) + rows + inside


def _loss(step: StepShape, pipeline: PipelineShape, backend: Backend) -> int:
    """Return the bytes of the loss, with the last slot, which the backward pass begins with."""
    single = step.compute_bytes * sum(step.on_device(weight, step.layout.params) for weight in step.single())
    slot = 0 if pipeline.gather == "per_iteration" else step.compute_bytes * _slot(step, pipeline)
    return loss_bytes(step, backend) + slot + single
