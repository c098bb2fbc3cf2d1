"""Provides the time of Pallas kernels, which the TPU compiler does not estimate: products at the matrix unit's peak.

`Peak(flops_per_second, windows).seconds(computation, instruction)` recognises JAX's splash attention by its kernel
names, and counts the pairs of a query and a key that the mask allows.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from gregale.audit.hlo import Computation, Instruction, Shape

# Products of [position, position, head_size] in a kernel: scores and outputs; in the backward pass scores, the weights'
# gradients, and the gradients by values and keys, or by queries. A fused kernel computes both, the first two once.
PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dkv": 4, "splash_mha_dq": 3}
FUSED = 5
_KERNEL = re.compile("|".join(PRODUCTS))


@dataclass(frozen=True)
class Peak:
    """Rate of kernels.

    - `flops_per_second`: peak of a device
    - `windows`: maximum number of keys that a query sees, including itself; None: all earlier ones. Each window has an
      equal share of the layers, because a kernel does not name its layer
    """

    flops_per_second: float
    windows: Sequence[int | None] = (None,)

    def seconds(self, computation: Computation, instruction: Instruction) -> float:
        """Return the seconds of one run of an instruction; 0 if it is no known kernel."""
        found = _KERNEL.search(instruction.op_name)
        if instruction.opcode != "custom-call" or found is None:
            return 0.0
        products = PRODUCTS[found[0]]
        if found[0] == "splash_mha_dkv" and len([each for each in instruction.shapes if wide(each)]) > 2:
            products = FUSED  # also returns the gradients by queries
        query = next(
            shape for shape in computation.operand_shapes(instruction) if len(shape.sizes) >= 3 and wide(shape)
        )
        *heads, positions, head_size = query.sizes
        pairs = visible(positions, self.windows)
        return 2 * products * prod(heads) * pairs * head_size / self.flops_per_second


def wide(shape: Shape) -> bool:
    """Return whether a shape is [..., heads, position, head_size], and not a mask, block numbers or scratch."""
    return len(shape.sizes) >= 3 and shape.dtype.startswith(("bf", "f"))


def visible(positions: int, windows: Sequence[int | None]) -> float:
    """Return the mean over windows of a causal mask's visible pairs: sum of min(i, window) for i to positions."""
    reaches = [min(positions, window or positions) for window in windows]
    return sum(reach * (reach + 1) / 2 + (positions - reach) * reach for reach in reaches) / len(reaches)
