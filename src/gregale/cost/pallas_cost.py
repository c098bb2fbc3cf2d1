"""Provides the time of Pallas kernels, which the TPU compiler does not estimate: attention, quantisation, experts.

`Kernels(chip, devices_a_chip).seconds(kernel_of(computation, instruction))` recognises kernels by name. A kernel is a
loop over pairs of blocks, of queries and of keys; its metadata count them. `kernel_cycles.json` has the cycles of a
step, of an outer block, and of a pair of each kind, for each chip, block size and head size.
`benchmarks/kernel_cycles.py` takes them from the compiler's bundles. A kernel that is not in the table counts as the
products of its pairs at the chip's peak. `quantising_of` recognises the kernels that quantise an array: they take the
time of their bytes in memory, or of their bundles if that is more. `grouped_of` recognises the products of experts:
they multiply each block of rows once for each expert that has some of them.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import inf, log2, prod
from typing import Any

from gregale.cost.chips import Chip
from gregale.cost.hlo import Computation, Instruction, Shape

# Products of [position, position, head_size] in a kernel: scores and outputs; in the backward pass scores, the weights'
# gradients, and the gradients by values and keys, or by queries. A fused kernel computes both, the first two once.
PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dkv": 4, "splash_mha_dq": 3, "splash_mha_fused": 5}
_KERNEL = re.compile("splash_mha_(?:fwd|dkv|dq|fused)")
TABLE = "kernel_cycles.json"

# Bundles for 1,024 values in the loops of `int8_quantise` and `gated_bits` in `gregale.model.kernels.tpu`, on a v5e.
BUNDLES = {
    "quantise_rows": 4.5,
    "quantise_columns": 3.2,
    "quantise_turned": 8.0,
    "gated_rows": 11.0,
    "gated_gradient_rows": 17.0,
    "gated_gradient_columns": 12.5,
}
_QUANTISING = re.compile("|".join(BUNDLES))
# Bundles of grouped kernels over the time of the matrix units for one product in bfloat16, for 2,048 x 768 on a v5e:
# `tgmm` adds blocks up, `int8_product` quantises rows, and `sum_of_turned` has two products.
GROUPED = {"gmm": 1.09, "tgmm": 1.33, "int8_product": 0.70, "sum_of_turned": 2.12}
_GROUPED = re.compile(rf"jit\(({'|'.join(GROUPED)})\)/pallas_call")


@dataclass(frozen=True)
class Pairs:
    """What a kernel does: steps of its grid, outer blocks, and pairs of blocks by the scores that are visible."""

    steps: int
    outer: int
    whole: int
    diagonal: int
    edge: int = 0

    @staticmethod
    def causal(positions: int, block: int, heads: int) -> "Pairs":
        """Return the pairs of a causal mask, which needs no step for what it hides."""
        rows = -(-positions // block)
        return Pairs(heads * rows * (rows + 1) // 2, heads * rows, heads * rows * (rows - 1) // 2, heads * rows)


@dataclass(frozen=True)
class Kernel:
    """An attention kernel in a program.

    - `block`: positions of a block of queries, and of keys
    - `pairs`: of all heads
    """

    name: str
    block: int
    head_size: int
    pairs: Pairs

    @property
    def key(self) -> str:
        """Return the name of the kernel's row in the table."""
        return f"{self.name} {self.block} {self.head_size}"


@dataclass(frozen=True)
class Quantising:
    """A kernel that quantises an array in a program: its bundles on one core, and the bytes that it moves."""

    bundles: float
    bytes: int


@dataclass(frozen=True)
class Grouped:
    """A kernel that multiplies rows by the matrices of their groups: FLOPs over its efficiency, and bytes it moves."""

    flops: float
    bytes: int


@dataclass(frozen=True)
class Kernels:
    """The kernels of a device."""

    chip: Chip
    devices_a_chip: int = 1

    def cycles(self, kernel: Kernel) -> list[float] | None:
        """Return the cycles of a kernel's step, outer block, and pair of each kind; None if the table lacks it.

        Those of the nearest block size are scaled by the rows of a block and of a pair, up to a factor of two.
        """
        rows = {tuple(key.split()): found for key, found in _table().get(self.chip.name, {}).items()}
        sizes = [int(block) for name, block, size in rows if (name, int(size)) == (kernel.name, kernel.head_size)]
        nearest = min(sizes, key=lambda size: abs(log2(size / kernel.block)), default=0)
        if not kernel.block / 2 <= nearest <= 2 * kernel.block:
            return None
        step, outer, *pairs = rows[kernel.name, str(nearest), str(kernel.head_size)]
        ratio = kernel.block / nearest
        return [step, ratio * outer, *(ratio**2 * pair for pair in pairs)]

    def seconds(self, kernel: Kernel | Quantising | Grouped) -> float:
        """Return the seconds of one run."""
        if isinstance(kernel, Grouped):
            chip = self.chip
            bounds = kernel.flops / chip.flops_per_second, kernel.bytes / chip.memory_bytes_per_second
            return max(bounds) * self.devices_a_chip
        if isinstance(kernel, Quantising):
            moving = kernel.bytes * self.devices_a_chip / self.chip.memory_bytes_per_second
            return max(moving, kernel.bundles / (self.chip.cycles_per_second or inf))
        pairs = kernel.pairs
        cycles = self.cycles(kernel)
        if cycles is not None and self.chip.cycles_per_second is not None:
            counts = (pairs.steps, pairs.outer, pairs.whole, pairs.diagonal, pairs.edge)
            total = sum(count * each for count, each in zip(counts, cycles, strict=True))
            return total / self.chip.cycles_per_second
        filled = -(-kernel.head_size // self.chip.matrix_unit) * self.chip.matrix_unit
        blocks = pairs.whole + pairs.diagonal + pairs.edge
        flops = 2 * PRODUCTS[kernel.name] * blocks * kernel.block**2 * filled
        return flops / (self.chip.flops_per_second / self.devices_a_chip)


def kernel_of(computation: Computation, instruction: Instruction) -> Kernel | None:
    """Return the attention kernel that an instruction calls; None for other instructions."""
    found = _KERNEL.search(instruction.op_name)
    if instruction.opcode != "custom-call" or found is None:
        return None
    query = next(shape for shape in computation.operand_shapes(instruction) if wide(shape))
    *heads, positions, head_size = query.sizes

    def count(name: str) -> int | None:
        given = instruction.attribute(rf'\\"{name}\\": (\d+)')
        return None if given is None else int(given)

    block = count("block_q") or positions
    counts = {name: count(name) for name in ("steps", "outer", "whole", "diagonal", "edge")}
    given = {name: each for name, each in counts.items() if each is not None}
    pairs = Pairs(**given) if len(given) == len(counts) else Pairs.causal(positions, block, prod(heads))
    return Kernel(found[0], block, head_size, pairs)


def attention_flops(equation: Any) -> float | None:
    """Return the FLOPs of an attention kernel in a jaxpr; None for other kernels.

    Of blocks that the mask hides in part it computes about half: parts of them that are hidden it leaves out.
    """
    given, name = equation.params, equation.params["name"] or ""
    found = _KERNEL.search(name)
    if found is None or "xprof_metadata" not in (given["metadata"] or {}):
        return None
    counts = json.loads(given["metadata"]["xprof_metadata"])
    size = next((each.aval.shape[-1] for each in equation.invars if len(each.aval.shape) == 4), None)
    if size is None or not {"whole", "diagonal", "edge", "block_q"} <= counts.keys():
        return None  # JAX's own kernels have the same names
    blocks = counts["whole"] + (counts["diagonal"] + counts["edge"]) / 2
    return 2 * PRODUCTS[found[0]] * blocks * counts["block_q"] ** 2 * size


def quantising_of(computation: Computation, instruction: Instruction) -> Quantising | None:
    """Return the kernel that an instruction calls to quantise an array; None for other instructions."""
    found = _QUANTISING.search(instruction.op_name)
    if instruction.opcode != "custom-call" or found is None:
        return None
    numbers, *_ = instruction.shapes
    moved = (*computation.operand_shapes(instruction), *instruction.shapes)
    return Quantising(BUNDLES[found[0]] * prod(numbers.sizes) / 1024, sum(shape.bytes for shape in moved))


def grouped_of(computation: Computation, instruction: Instruction) -> Grouped | None:
    """Return the kernel of experts that an instruction calls; None for other instructions.

    Its third operand has a number for each visit of a block of rows: there are as many as blocks, and at most one more
    for each group but the first.
    """
    found = _GROUPED.search(instruction.op_name)
    if instruction.opcode != "custom-call" or found is None:
        return None
    operands = computation.operand_shapes(instruction)
    moved = (*operands, *instruction.shapes)
    groups, inputs, outputs = next(shape.sizes for shape in moved if len(shape.sizes) == 3)
    rows, visits = next(shape.sizes[0] for shape in operands if len(shape.sizes) == 2), operands[2].sizes[0]
    visited = rows * visits / (visits - groups + 1)
    return Grouped(2 * visited * inputs * outputs * GROUPED[found[1]], sum(shape.bytes for shape in moved))


@cache
def _table() -> dict[str, dict[str, list[int]]]:
    return json.loads(files("gregale.cost").joinpath(TABLE).read_text(encoding="utf-8"))


def wide(shape: Shape) -> bool:
    """Return whether a shape is [..., heads, position, head_size], and not a mask, block numbers or scratch."""
    return len(shape.sizes) >= 3 and shape.dtype.startswith(("bf", "f"))
