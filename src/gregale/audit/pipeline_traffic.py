"""The bytes that a pipelined stack of layers has to send in a step, in closed form, counted as in `audit.traffic`."""

from __future__ import annotations

from haliax import NamedArray

from gregale.audit.step import Backend, PipelineShape, StepShape
from gregale.audit.traffic import DATA, MODEL, STAGE, Transfer, activation_bytes, backward_sums

INTEGER = 4
EXTRAS = 2  # positions and segments travel with their rows
HANDED_ON = 4  # outputs, a column of inputs, and the cotangents of both


def pipelined(step: StepShape, pipeline: PipelineShape, backend: Backend) -> list[Transfer]:
    """What the layers send in all microbatches of a step.

    In each pass weights change from the order of devices of their rows to that of their stages and gradients back; they
    are gathered over `data` for the window, and each iteration hands on activations.
    """
    width, size = max(step.compute_bytes, backend.narrowest_bytes), step.mesh
    columns = pipeline.microbatches // size[STAGE]
    chunk = activation_bytes(step, backend) // columns
    iterations = step.microbatches * pipeline.iterations
    rows = EXTRAS * INTEGER * step.tokens * size[STAGE]
    per_stage = step.layers // (pipeline.repeats * size[STAGE])
    found = [each for weight in step.stacked() for each in _weight(step, weight, pipeline, width)]
    return [
        *found,
        Transfer("activations", "collective-permute", (STAGE,), chunk, HANDED_ON * iterations),
        Transfer("positions and segments", "all-gather", (STAGE,), rows, step.microbatches),
        Transfer("activations", "all-reduce", (MODEL,), _sums(step, backend) * chunk, per_stage * iterations),
    ]


def _weight(step: StepShape, weight: NamedArray, pipeline: PipelineShape, width: int) -> list[Transfer]:
    """One weight of all layers: to its stages and back, gathered, and its gradient summed."""
    passes, R = step.microbatches, pipeline.repeats
    gathered = step.on_device(weight, step.layout.compute) * width // step.mesh[STAGE]  # of all repeats of a stage
    gathers, sums, parts = {
        "per_repeat": (2 * R, R, R),
        "per_iteration": (2 * (pipeline.microbatches * R + 1), pipeline.iterations, R),
        "once": (1, 1, 1),
    }[pipeline.gather]
    is_split = DATA in step.split_by(weight, step.layout.params)
    moved = step.on_device(weight, step.layout.params) * width
    kind = "reduce-scatter" if is_split else "all-reduce"
    found = [
        Transfer("to stages and back", "all-to-all", (STAGE,), 2 * moved, passes),
        Transfer("gradients", kind, (DATA,), gathered // parts, passes * sums),
    ]
    if is_split:
        found.append(Transfer("weights", "all-gather", (DATA,), gathered // parts, passes * gathers))
    return found


def _sums(step: StepShape, backend: Backend) -> int:
    """How often a layer of a stage sums activations over `model`: forward, recomputed, and in the backward pass."""
    return 2 + 1 + backward_sums(backend)
