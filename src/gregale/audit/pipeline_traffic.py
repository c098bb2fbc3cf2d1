"""Provides the bytes that a pipelined stack of layers sends in a step, in closed form as in `audit.traffic`."""

from dataclasses import replace

from haliax import NamedArray

from gregale.audit.adapter_traffic import products_with_factors
from gregale.audit.expert_traffic import sums_of_experts
from gregale.audit.pipeline_memory import layers_of_a_stage, of_an_iteration
from gregale.audit.pipeline_shape import PipelineShape
from gregale.audit.step import Backend, StepShape, layers_of
from gregale.audit.traffic import (
    DATA,
    FLOAT32,
    MODEL,
    RECOMPUTED_SUMS,
    STAGE,
    activation_bytes,
    head_norm_sums,
    is_on_model,
    sums_of_a_layer,
    trained_in,
)
from gregale.audit.transfer import Transfer, bytes_by_part

INTEGER = 4
KEY = 8  # of a row, for what adapters drop
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
        *_factors(step, one, pipeline, backend),
        Transfer("activations", "collective-permute", (STAGE,), activations, handed_on),
        Transfer("positions and segments", "all-gather", (STAGE,), EXTRAS * INTEGER * step.tokens * stages, passes),
        Transfer("keys of dropout", "all-gather", (STAGE,), KEY * step.drops * step.rows_here * stages, passes),
        Transfer("activations", "all-reduce", (MODEL,), sums * activations, times),
        Transfer("norms over heads", "all-reduce", (MODEL,), norms, times),
        *(replace(each, times=times) for each in of_experts),
    ]


def _weight(step: StepShape, weight: NamedArray, pipeline: PipelineShape, backend: Backend) -> list[Transfer]:
    """Return the transfers of one weight of all layers: to its stages and back, its gathers, its gradient sums.

    A frozen weight has no gradient; one in blocks is sent as codes and scales.
    """
    width, passes, iterations = max(step.compute_bytes, backend.narrowest_bytes), step.microbatches, pipeline.iterations
    split, held = step.split_by(weight, step.layout.params), step.format_of(weight)
    moved, slot = (step.on_device(weight, mapping) for mapping in (step.layout.params, step.layout.compute))
    slot //= step.mesh[STAGE] * pipeline.repeats
    size, sums = {
        "per_repeat": (slot, pipeline.repeats),
        "per_iteration": (slot, iterations),
        "once": (slot * pipeline.repeats, 1),
    }[pipeline.gather]
    found, once = [], 1 if backend.hoists_gathers else passes
    least = width if held is None else backend.narrowest_bytes
    if STAGE in split:
        parts = bytes_by_part(held, moved, least).items()
        found += [Transfer(part, "all-to-all", (STAGE,), count, once) for part, count in parts]
    if DATA in split:
        bare = {"weights": step.compute_bytes} if held is None else {"scales": held.scale_bits // 8}
        for part, count in bytes_by_part(held, size, least).items():
            times = _gathers(passes, pipeline, backend, widens=bare.get(part, FLOAT32) < backend.narrowest_bytes)
            found.append(Transfer(part, "all-gather", (DATA,), count, times))
    if not trained_in(step, [weight]):
        return found
    back, kind = "all-to-all" if STAGE in split else "all-gather", "reduce-scatter" if DATA in split else "all-reduce"
    found.append(Transfer("from stages", back, (STAGE,), moved * width, passes))
    found.append(Transfer("gradients", kind, (DATA,), size * width, passes * sums))
    if not is_on_model(weight):
        found.append(Transfer("gradients", "all-reduce", (MODEL,), slot * width, passes * iterations))
    return found


def _factors(step: StepShape, one: StepShape, pipeline: PipelineShape, backend: Backend) -> list[Transfer]:
    """Return the sums over `model` of products with factors; `one`: see `of_an_iteration`."""
    forward, apart = 3 if step.quantised else 2, step.mesh[STAGE] * pipeline.repeats  # layers that decode run again
    times = step.microbatches * pipeline.iterations
    return [
        Transfer("factors", "all-reduce", (MODEL,), size, times * layers_of(factor) // apart)
        for factor, size in products_with_factors(step, backend, one.tokens, forward)
    ]


def _gathers(passes: int, pipeline: PipelineShape, backend: Backend, widens: bool) -> int:
    """Return the number of gathers of a weight in a step; the compiler may do a gather that all passes share once.

    - `widens`: the compiler widens the values, and leaves this in the loop of the last iterations
    """
    same = 1 if backend.hoists_gathers else passes
    with_one_repeat = same if pipeline.repeats == 1 else passes
    match pipeline.gather:
        case "per_iteration" if widens:
            return 2 * pipeline.iterations * passes
        case "per_repeat":
            return 2 * pipeline.repeats * with_one_repeat
        case "per_iteration":
            return 2 * (pipeline.microbatches * pipeline.repeats * passes + with_one_repeat)
    return same
