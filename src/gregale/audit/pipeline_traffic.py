"""Provides the bytes that a pipelined stack of layers sends in a step, in closed form as in `audit.traffic`."""

from dataclasses import replace

from haliax import NamedArray

from gregale.audit.expert_traffic import sums_of_experts
from gregale.audit.pipeline_memory import layers_of_a_stage, of_an_iteration
from gregale.audit.pipeline_shape import PipelineShape
from gregale.audit.step import Backend, StepShape
from gregale.audit.traffic import (
    DATA,
    FLOAT32,
    MODEL,
    RECOMPUTED_SUMS,
    STAGE,
    Transfer,
    activation_bytes,
    head_norm_sums,
    is_on_model,
    sums_of_a_layer,
)

INTEGER = 4
EXTRAS = 2  # positions and segments travel with their rows
HANDED_ON = 4  # outputs, a column of inputs, and the cotangents of both


def pipelined(step: StepShape, pipeline: PipelineShape, backend: Backend) -> list[Transfer]:
    """Return the transfers of the layers in all microbatches of a step.

    In each pass weights move from the device order of their rows to that of their stages, and gradients back. Weights
    are gathered over `data` for the window. Each iteration sends activations to the next stage.
    """
    stages, passes, iterations = step.mesh[STAGE], step.microbatches, step.microbatches * pipeline.iterations
    one, layers = of_an_iteration(step, pipeline), layers_of_a_stage(step, pipeline)
    activations = activation_bytes(step, backend) * stages // pipeline.microbatches
    handed_on = HANDED_ON * iterations
    if pipeline.drain == 1:  # not a loop: its last outputs are unused, and their cotangent is zero
        handed_on -= 2 * passes - backend.hoists_gathers
    sums = sums_of_a_layer(step, backend)
    if layers > 1 and step.remat in RECOMPUTED_SUMS and not step.norms_after:
        sums += 1  # the next layer is recomputed from the complete output
    norms, times = head_norm_sums(step) * FLOAT32 * one.tokens, layers * iterations
    of_experts = sums_of_experts(one, backend, activations, step.remat in RECOMPUTED_SUMS) if step.active else []
    return [
        *(each for weight in step.stacked() for each in _weight(step, weight, pipeline, backend)),
        Transfer("activations", "collective-permute", (STAGE,), activations, handed_on),
        Transfer("positions and segments", "all-gather", (STAGE,), EXTRAS * INTEGER * step.tokens * stages, passes),
        Transfer("activations", "all-reduce", (MODEL,), sums * activations, times),
        Transfer("norms over heads", "all-reduce", (MODEL,), norms, times),
        *(replace(each, times=times) for each in of_experts),
    ]


def _weight(step: StepShape, weight: NamedArray, pipeline: PipelineShape, backend: Backend) -> list[Transfer]:
    """Return the transfers of one weight of all layers: to its stages and back, its gathers, its gradient sums."""
    width, passes, iterations = max(step.compute_bytes, backend.narrowest_bytes), step.microbatches, pipeline.iterations
    split = step.split_by(weight, step.layout.params)
    moved = step.on_device(weight, step.layout.params) * width
    slot = step.on_device(weight, step.layout.compute) * width // (step.mesh[STAGE] * pipeline.repeats)
    found = []
    if STAGE in split:
        found.append(Transfer("to stages", "all-to-all", (STAGE,), moved, 1 if backend.hoists_gathers else passes))
        found.append(Transfer("from stages", "all-to-all", (STAGE,), moved, passes))
    else:
        found.append(Transfer("from stages", "all-gather", (STAGE,), moved, passes))
    size, sums = {
        "per_repeat": (slot, pipeline.repeats),
        "per_iteration": (slot, iterations),
        "once": (slot * pipeline.repeats, 1),
    }[pipeline.gather]
    if DATA in split:
        found.append(Transfer("weights", "all-gather", (DATA,), size, _gathers(passes, pipeline, backend)))
    kind = "reduce-scatter" if DATA in split else "all-reduce"
    found.append(Transfer("gradients", kind, (DATA,), size, passes * sums))
    if not is_on_model(weight):
        found.append(Transfer("gradients", "all-reduce", (MODEL,), slot, passes * iterations))
    return found


def _gathers(passes: int, pipeline: PipelineShape, backend: Backend) -> int:
    """Return the number of gathers of a weight in a step; the compiler may do a gather that all passes share once."""
    same = 1 if backend.hoists_gathers else passes
    with_one_repeat = same if pipeline.repeats == 1 else passes
    match pipeline.gather:
        case "per_repeat":
            return 2 * pipeline.repeats * with_one_repeat
        case "per_iteration":
            return 2 * (pipeline.microbatches * pipeline.repeats * passes + with_one_repeat)
    return same
