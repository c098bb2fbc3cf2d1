"""Provides the memory of a step with pipelined layers in closed form, as `audit.memory` for scanned layers."""

from dataclasses import replace

from gregale.audit.memory import (
    FLOAT32,
    Estimate,
    layer_activations,
    loss_bytes,
    saved_by_layer,
    unsummed_head,
    values_of_a_layer,
)
from gregale.audit.pipeline_shape import PipelineShape
from gregale.audit.step import Backend, StepShape

SLOTS = 2  # of the window
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

    Of several repeats the backward pass copies those of one.
    """
    one = of_an_iteration(step, pipeline)
    copied = pipeline.microbatches if pipeline.repeats > 1 else 0
    layers = layers_of_a_stage(step, pipeline)
    return (pipeline.iterations + copied) * (_stream(one) + layers * _named(one, backend))


def _stream(one: StepShape) -> int:
    return one.tokens * one.embed * one.compute_bytes


def _named(one: StepShape, backend: Backend) -> int:
    """Return the bytes of a layer's values that `remat` names."""
    return saved_by_layer(one, backend) - _stream(one)


def _weights(step: StepShape, pipeline: PipelineShape) -> int:
    """Return the bytes of the weights of a stage's layers in all repeats, and of their gradients."""
    if pipeline.gather == "once" and pipeline.repeats > 1:
        values = pipeline.repeats * _slot(step, pipeline)
    else:
        values = sum(step.on_device(weight, step.layout.params) for weight in step.stacked())
    return 2 * step.compute_bytes * values


def _iteration(step: StepShape, pipeline: PipelineShape, backend: Backend) -> int:
    """Return the bytes of an iteration's backward pass: slots, their gradients, activations, and the head's gradient.

    The backward pass of one of several layers reads gate and up where they are saved.
    """
    one, several = of_an_iteration(step, pipeline), layers_of_a_stage(step, pipeline) > 1
    rows = _stream(step) * (COPIES if pipeline.microbatches > step.mesh["stage"] else 1)
    own = saved_by_layer(replace(one, remat="none"), backend) - _named(one, backend)
    saved = layers_of_a_stage(step, pipeline) * own
    activations = layer_activations(one, backend)
    if several or step.remat == "projections":
        activations -= 2 * max(step.compute_bytes, backend.narrowest_bytes) * one.tokens * one.mlp
    inside = saved + activations if several else max(saved, activations)
    return _value_bytes(step, pipeline, backend) * _slot(step, pipeline) + rows + inside + unsummed_head(step)


def _value_bytes(step: StepShape, pipeline: PipelineShape, backend: Backend) -> int:
    """Return the bytes of a value of the weights in use: its slots, their gradients, and that of the iteration.

    The gradient of a single layer is added at once. With one repeat one slot is used.
    """
    width = max(step.compute_bytes, backend.narrowest_bytes)
    apart = FLOAT32 if layers_of_a_stage(step, pipeline) > 1 else 0
    if pipeline.gather == "per_iteration":
        return width + apart
    return width + FLOAT32 if pipeline.repeats == 1 else SLOTS * (width + FLOAT32) + apart


def _loss(step: StepShape, pipeline: PipelineShape, backend: Backend) -> int:
    """Return the bytes of the loss, with the last slot, which the backward pass begins with."""
    single = step.compute_bytes * sum(step.on_device(weight, step.layout.params) for weight in step.single())
    slot = 0 if pipeline.gather == "per_iteration" else step.compute_bytes * _slot(step, pipeline)
    return loss_bytes(step, backend) + slot + single
