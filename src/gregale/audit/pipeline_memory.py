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
from gregale.audit.step import Backend, StepShape, is_stacked
from gregale.axes.layout import AxisMapping

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


def _slot(step: StepShape, pipeline: PipelineShape, width: int) -> int:
    """Return the bytes of the gathered weights of one repeat, of a width unless they are in blocks."""
    return layers_of_a_stage(step, pipeline) * _held(step, step.layout.compute, width) // step.layers


def _held(step: StepShape, mapping: AxisMapping, width: int) -> int:
    """Return a device's bytes of the weights of all layers under a mapping, of a width unless they are in blocks."""
    found = 0.0
    for weight in step.stacked():
        held = step.format_of(weight)
        found += step.on_device(weight, mapping) * (width if held is None else held.bytes_per_parameter)
    return int(found)


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
    whole, width = pipeline.gather == "once" and pipeline.repeats > 1, step.compute_bytes
    mapping = step.layout.compute if whole else step.layout.params
    gradients = width * sum(step.on_device(weight, mapping) for weight in step.weights if is_stacked(weight))
    return (_held(step, mapping, width) + gradients) // (step.mesh["stage"] if whole else 1)


def _iteration(step: StepShape, pipeline: PipelineShape, backend: Backend) -> int:
    """Return the bytes of an iteration's backward pass: slots, their gradients, activations, and the head's gradient.

    The backward pass of one of several layers reads gate and up where they are saved. Layers that decode weights save
    what `projections` names.
    """
    width = max(step.compute_bytes, backend.narrowest_bytes)
    one, several = of_an_iteration(step, pipeline), layers_of_a_stage(step, pipeline) > 1
    rows = _stream(step) * (COPIES if pipeline.microbatches > step.mesh["stage"] else 1)
    inner = replace(one, remat="projections" if step.quantised else "none")
    own = saved_by_layer(inner, backend) - _named(one, backend)
    saved = layers_of_a_stage(step, pipeline) * own
    activations = layer_activations(one, backend)
    if several or step.remat == "projections":
        activations -= 2 * width * one.tokens * one.mlp
    inside = saved + activations if several else max(saved, activations)
    decoded = width * sum(step.on_device(weight, step.layout.compute) for weight in step.quantised) // step.layers
    return _in_use(step, pipeline, width) + decoded + rows + inside + unsummed_head(step)


def _in_use(step: StepShape, pipeline: PipelineShape, width: int) -> int:
    """Return the bytes of the weights in use: the slots, their gradients, and that of the iteration.

    The gradient of a single layer is added at once. With one repeat one slot is used. The weights that stages choose
    from the slots are a copy, which counts beside frozen weights; those of trained ones take less than gradients.
    """
    slot, layers = _slot(step, pipeline, width), layers_of_a_stage(step, pipeline)
    gradient = FLOAT32 * layers * values_of_a_layer(step, trained=True)
    apart = gradient if layers > 1 else 0
    if pipeline.gather == "per_iteration":
        return slot + apart
    chosen = slot if step.adapts else 0
    return chosen + (slot + gradient if pipeline.repeats == 1 else SLOTS * (slot + gradient) + apart)


def _loss(step: StepShape, pipeline: PipelineShape, backend: Backend) -> int:
    """Return the bytes of the loss, with the last slot, which the backward pass begins with."""
    cast = [] if step.adapts else step.single()
    single = step.compute_bytes * sum(step.on_device(weight, step.layout.params) for weight in cast)
    slot = 0 if pipeline.gather == "per_iteration" else _slot(step, pipeline, step.compute_bytes)
    return loss_bytes(step, backend) + slot + single
