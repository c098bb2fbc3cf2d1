"""The time of Pallas kernels, of which the TPU compiler estimates none: their products at the matrix unit's peak.

`Peak(flops_per_second, windows).seconds(computation, instruction)` knows JAX's splash attention by its kernels' names,
and counts what the mask shows: pairs of a query and a key that it sees.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from gregale.audit.hlo import Computation, Instruction, Shape

# Products of [position, position, head_size] in a kernel: scores and outputs; in the backward pass scores, the weights'
# gradients, and the gradients by values and keys, or by queries. A fused one does what both do, the first two once.
PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dkv": 4, "splash_mha_dq": 3}
FUSED = 5
_KERNEL = re.compile("|".join(PRODUCTS))


@dataclass(frozen=True)
class Peak:
    """What kernels are timed by.

    - `flops_per_second`: of a device
    - `windows`: of layers, in equal shares, for a kernel does not tell whose it is: keys that a query sees at most,
      itself included; None: all before it
    """

    flops_per_second: float
    windows: Sequence[int | None] = (None,)

    def seconds(self, computation: Computation, instruction: Instruction) -> float:
        """Of one run of an instruction; 0 if it is no kernel that is known."""
        found = _KERNEL.search(instruction.op_name)
        if instruction.opcode != "custom-call" or found is None:
            return 0.0
        products = PRODUCTS[found[0]]
        if found[0] == "splash_mha_dkv" and len([each for each in instruction.shapes if wide(each)]) > 2:
            products = FUSED  # gives the gradients by queries too
        query = next(
            shape for shape in computation.operand_shapes(instruction) if len(shape.sizes) >= 3 and wide(shape)
        )
        *heads, positions, head_size = query.sizes
        pairs = visible(positions, self.windows)
        return 2 * products * prod(heads) * pairs * head_size / self.flops_per_second


def wide(shape: Shape) -> bool:
    """Whether it is [..., heads, position, head_size]; masks have bytes, block numbers integers, scratch two axes."""
    return len(shape.sizes) >= 3 and shape.dtype.startswith(("bf", "f"))


def visible(positions: int, windows: Sequence[int | None]) -> float:
    """Pairs of a query and a key that it sees, under a causal mask: the sum of min(i, window) for i to positions.

    The mean over the windows.
    """
    reaches = [min(positions, window or positions) for window in windows]
    return sum(reach * (reach + 1) / 2 + (positions - reach) * reach for reach in reaches) / len(reaches)
