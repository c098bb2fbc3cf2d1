"""Provides the time of Pallas kernels, which the TPU compiler does not estimate: that of JAX's splash attention.

`Kernels(chip, devices_a_chip, windows).seconds(kernel_of(computation, instruction))` recognises kernels by name. A
kernel is a loop over a grid of blocks of queries and keys. `kernel_cycles.json` has the cycles of one step of the grid,
of one row of blocks, and of one visible block, for each chip, block size and length, of which the nearest counts.
`benchmarks/kernel_cycles.py` takes them from the compiler's bundles. A size that is not in the table counts as the
products of its visible blocks at the chip's peak.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import log, prod

from gregale.audit.chips import Chip
from gregale.audit.hlo import Computation, Instruction, Shape

# Products of [position, position, head_size] in a kernel: scores and outputs; in the backward pass scores, the weights'
# gradients, and the gradients by values and keys, or by queries. A fused kernel computes both, the first two once.
PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dkv": 4, "splash_mha_dq": 3, "splash_mha_fused": 5}
_SUFFIXES = {"splash_mha_fwd": "", "splash_mha_dkv": "_dkv", "splash_mha_fused": "_dkv", "splash_mha_dq": "_dq"}
_KERNEL = re.compile("splash_mha_(?:fwd|dkv|dq)")
TABLE = "kernel_cycles.json"


@dataclass(frozen=True)
class Kernel:
    """A splash kernel in a program: `heads` of all rows, and the block sizes of queries and keys."""

    name: str
    heads: int
    positions: int
    head_size: int
    queries: int
    keys: int

    @property
    def key(self) -> str:
        """Return the name of the kernel's row in the table."""
        return f"{self.name} {self.queries}x{self.keys} {self.head_size}"

    def grid(self, window: int | None) -> tuple[int, int, int]:
        """Return the steps, rows and visible blocks of one head's grid; a step outside of the mask does nothing."""
        seen = []
        rows, columns = -(-self.positions // self.queries), -(-self.positions // self.keys)
        for row in range(rows):
            first = max(0, row * self.queries - (window or self.positions) + 1) // self.keys
            last = min(columns, -(-(row + 1) * self.queries // self.keys))
            seen.append(range(first, last))
        if _SUFFIXES[self.name] == "_dkv":  # its rows are blocks of keys
            seen = [[row for row, found in enumerate(seen) if column in found] for column in range(columns)]
        return len(seen) * max(map(len, seen)), len(seen), sum(map(len, seen))


@dataclass(frozen=True)
class Kernels:
    """The kernels of a device.

    - `windows`: maximum number of keys that a query sees, including itself; None: all earlier ones. Each window has an
      equal share of the layers, because a kernel does not name its layer
    """

    chip: Chip
    devices_a_chip: int = 1
    windows: Sequence[int | None] = (None,)

    def lengths(self, kernel: Kernel) -> dict[str, list[int]]:
        """Return the cycles of a kernel's step, row and block by length; empty if the table lacks it."""
        return _table().get(self.chip.name, {}).get(kernel.key, {})

    def seconds(self, kernel: Kernel) -> float:
        """Return the seconds of one run."""
        grids = [kernel.grid(window) for window in self.windows]
        steps, rows, blocks = (sum(counts) / len(grids) for counts in zip(*grids, strict=True))
        if (lengths := self.lengths(kernel)) and self.chip.cycles_per_second is not None:
            nearest = min(lengths, key=lambda length: abs(log(int(length) / kernel.positions)))
            of_step, of_row, of_block = lengths[nearest]
            of_head = (steps * of_step + rows * of_row + blocks * of_block) / self.chip.cycles_per_second
        else:
            filled = -(-kernel.head_size // self.chip.matrix_unit) * self.chip.matrix_unit
            flops = 2 * PRODUCTS[kernel.name] * blocks * kernel.queries * kernel.keys * filled
            of_head = flops / (self.chip.flops_per_second / self.devices_a_chip)
        return kernel.heads * of_head


def kernel_of(computation: Computation, instruction: Instruction) -> Kernel | None:
    """Return the splash kernel that an instruction calls; None for other instructions."""
    found = _KERNEL.search(instruction.op_name)
    if instruction.opcode != "custom-call" or found is None:
        return None
    query = next(shape for shape in computation.operand_shapes(instruction) if wide(shape))
    *heads, positions, head_size = query.sizes
    name = found[0]
    if name == "splash_mha_dkv" and any(len(shape.sizes) > len(query.sizes) for shape in instruction.shapes):
        name = "splash_mha_fused"  # also returns the gradients by queries, for each block of keys
    queries, keys = (
        int(instruction.attribute(rf'\\"block_{part}{_SUFFIXES[name]}\\": (\d+)') or positions) for part in ("q", "kv")
    )
    return Kernel(name, prod(heads), positions, head_size, queries, keys)


@cache
def _table() -> dict[str, dict[str, dict[str, list[int]]]]:
    return json.loads(files("gregale.audit").joinpath(TABLE).read_text(encoding="utf-8"))


def wide(shape: Shape) -> bool:
    """Return whether a shape is [..., heads, position, head_size], and not a mask, block numbers or scratch."""
    return len(shape.sizes) >= 3 and shape.dtype.startswith(("bf", "f"))


def visible(positions: int, windows: Sequence[int | None]) -> float:
    """Return the mean over windows of a causal mask's visible pairs: sum of min(i, window) for i to positions."""
    reaches = [min(positions, window or positions) for window in windows]
    return sum(reach * (reach + 1) / 2 + (positions - reach) * reach for reach in reaches) / len(reaches)
