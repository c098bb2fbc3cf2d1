"""Provides the bytes that factors of adapters send over `model`, in closed form."""

from collections.abc import Iterator
from math import prod

from haliax import NamedArray

from gregale.audit.step import Backend, StepShape, layers_of
from gregale.audit.transfer import Transfer
from gregale.axes.layout import CONTEXT, LORA_RANK, MODEL

SHARDS = ("stage", CONTEXT, "data")
INTEGER = 4


def sums_of_factors(step: StepShape, backend: Backend) -> list[Transfer]:
    """Return what adapters of scanned layers sum: products over `model`, and keys of dropout over `context`."""
    forward = 1 if step.remat == "none" else 2
    found = [
        Transfer("products with factors", "all-reduce", (MODEL,), size, step.microbatches * layers_of(factor))
        for factor, size in products_with_factors(step, backend, step.tokens, forward)
    ]
    keys = INTEGER * step.rows_here * (step.drops and step.mesh[CONTEXT] > 1)
    return [*found, Transfer("keys of dropout", "all-reduce", (CONTEXT,), keys, step.microbatches)]


def products_with_factors(
    step: StepShape, backend: Backend, tokens: int, forward: int
) -> Iterator[tuple[NamedArray, int]]:
    """Yield each factor with a sum over `model` in products of the width `lora_rank`, and the bytes of it in a layer.

    A factor A whose inputs are split sums x A, and, for dropout, shares its first row. A factor B whose outputs are
    split sums the gradient by x A.

    - `tokens`: of a product on one device
    - `forward`: how often x A is computed: again in the backward pass, which needs it for the gradient of B
    """
    width = max(step.compute_bytes, backend.narrowest_bytes)
    for factor in step.weights if step.adapts else []:
        if MODEL in step.split_by(factor, step.layout.compute):
            is_a = factor.axes[-1].name == LORA_RANK
            rows = forward * (tokens + step.drops) if is_a else tokens
            yield factor, width * rows * factor.resolve_axis(LORA_RANK).size


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
