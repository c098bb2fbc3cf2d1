"""Provides the bytes that factors of adapters send over `model`, in closed form."""

from math import prod

from haliax import NamedArray

from gregale.audit.step import Backend, StepShape, layers_of
from gregale.audit.transfer import Transfer
from gregale.axes.layout import CONTEXT, LORA_RANK, MODEL

SHARDS = ("stage", CONTEXT, "data")


def products_with_factors(step: StepShape, backend: Backend) -> list[Transfer]:
    """Return the sums over `model` of adapters' products of the width `lora_rank`.

    A factor A whose inputs are split sums x A, and again in the backward pass, which needs it for the gradient of B. A
    factor B whose outputs are split sums the gradient by x A.
    """
    width, found = max(step.compute_bytes, backend.narrowest_bytes), []
    for factor in step.weights if step.adapts else []:
        if MODEL in step.split_by(factor, step.layout.compute):
            passes = 2 if factor.axes[-1].name == LORA_RANK and step.remat != "none" else 1
            size = width * step.tokens * factor.resolve_axis(LORA_RANK).size
            times = passes * step.microbatches * layers_of(factor)
            found.append(Transfer("products with factors", "all-reduce", (MODEL,), size, times))
    return found


def gradient_in_parts(step: StepShape, weight: NamedArray, size: int, times: int) -> list[Transfer]:
    """Return the transfers of the gradient of a factor that `model` does not split; none if it is summed as others are.

    If the devices that store parts of the factor divide `model`, the partitioner gives each device of `model` the
    product for one part. Parts are summed axis by axis, and then move to the devices that store them.
    """
    stored = step.split_by(weight, step.layout.params)
    parts = prod(step.mesh[axis] for axis in stored)
    if not step.adapts or MODEL in stored or parts == 1 or step.mesh[MODEL] % parts:
        return []
    sums = [Transfer("gradients", "all-reduce", (axis,), size // parts, times) for axis in SHARDS]
    return [*sums, Transfer("gradients", "collective-permute", (*stored, MODEL), size // parts, times)]
