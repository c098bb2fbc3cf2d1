"""Provides the bytes that devices send which share sequences (`mesh.context`), in closed form."""

from collections import Counter

from gregale.audit.step import Backend, StepShape
from gregale.audit.transfer import Transfer
from gregale.axes.layout import CONTEXT

INTEGER = 4


def keys_and_values(step: StepShape, backend: Backend, compares: bool = False) -> list[Transfer]:
    """Return the transfers of keys, values and segments of sequences that devices share, and of their gradients.

    - `compares`: of the forward pass with which a loss compares; it takes segments that were gathered once
    """
    if step.mesh[CONTEXT] == 1:
        return []
    width, layers = max(step.compute_bytes, backend.narrowest_bytes), step.microbatches * step.layers
    passes = 1 if step.remat == "none" else 2
    once = step.microbatches * (not compares) if backend.hoists_gathers else layers
    found = [Transfer("segments", "all-gather", (CONTEXT,), INTEGER * step.rows_here * step.positions, once)]
    for reach, share in Counter(step.reaches).items():
        times, size = layers * share // len(step.reaches), 2 * step.shared_keys(reach) * width
        there, back = "all-gather", "reduce-scatter"
        if reach is not None:
            there, back, size = "collective-permute", "collective-permute", size * reach // (reach + 1)
        found += [
            Transfer("keys and values", there, (CONTEXT,), size, passes * times),
            Transfer("keys and values", back, (CONTEXT,), size, times * (not compares)),
        ]
    return found
