"""Sizes of the attention kernels' blocks, by chip, length and window."""

from dataclasses import dataclass, replace

LANES = 128  # values in a row of a vector unit; blocks are multiples of it
COMPUTED = (512, 384, 256, 128)  # keys of a block in one computation: the largest divisor
DIAGONAL = (256, 384, 128)  # the same for blocks at the diagonal

LARGEST_HEAD_SIZE = 256  # for which these blocks fit, in bfloat16 and in float32
FEWEST_IN_WINDOW = 512  # smaller blocks cost more in overhead than a narrow window saves
MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """What fits the vector memory of a chip.

    - `rows`: tokens of a block
    - `working`: bytes for blocks, sums and scores; None: the compiler's own limit
    - `kept`: bytes for the float32 gradients by queries of a group of heads, which the fused backward pass keeps
    """

    rows: int
    working: int | None
    kept: int


# The best blocks by `benchmarks/kernel_cycles.py` are the largest that fit: with parts of 256 at the diagonal they
# compute no more than smaller ones, and take fewer steps.
LIMITS = {
    "TPU v5 lite": Limits(2048, 32 * MIB, 64 * MIB),
    "TPU v5": Limits(2048, 28 * MIB, 32 * MIB),
    "TPU v6 lite": Limits(2048, 32 * MIB, 64 * MIB),
}
ELSEWHERE = Limits(1024, None, 4 * MIB)


@dataclass(frozen=True)
class Block:
    """The division of a pair of blocks.

    - `size`: tokens of a block, of queries and of keys
    - `compute`: keys of a block in one computation
    - `diagonal`: the same for a block at the diagonal, where each computation leaves out the queries before its keys
    """

    size: int
    compute: int
    diagonal: int

    @staticmethod
    def of(size: int) -> "Block":
        """Return a block in parts that divide it."""
        compute, diagonal = (next(keys for keys in most if size % keys == 0) for most in (COMPUTED, DIAGONAL))
        return Block(size, compute, diagonal)


@dataclass(frozen=True)
class Blocks:
    """The division of a row of tokens.

    - `length`: tokens of a row, padded to whole blocks
    - `block`: of both passes
    - `working`: bytes of vector memory of a kernel; None: the compiler's own limit
    - `kept`: bytes that the fused backward kernel, which computes dq together with dk and dv, needs beside these; None:
      two kernels do
    """

    length: int
    block: Block
    working: int | None
    kept: int | None

    @property
    def fused(self) -> bool:
        return self.kept is not None

    @property
    def vector_memory(self) -> int | None:
        """Return the bytes for the kernels of the backward pass."""
        return None if self.working is None else self.working + (self.kept or 0)


def blocks_for(device_kind: str, length: int, window: int | None, head_size: int = LANES, group: int = 1) -> Blocks:
    """Return the blocks for rows of `length` tokens on a chip, of equal size and as few as the maximum size allows.

    Blocks are as even as their multiples allow, which keeps padding small, and hardly longer than a window. They are
    half as long for heads wider than one row of lanes.

    - `group`: heads of queries to a head of keys
    """
    limits = LIMITS.get(device_kind, ELSEWHERE)
    most = limits.rows if head_size <= LANES else limits.rows // 2
    if window is not None:
        most = min(most, max(FEWEST_IN_WINDOW, _up(window, 2 * LANES)))
    count = -(-length // most)
    size = -(-length // count)
    size = _up(size, LANES if size <= COMPUTED[0] else 2 * LANES)
    length = _up(length, size)
    kept = group * length * _up(head_size, LANES) * 4
    return Blocks(length, Block.of(size), limits.working, kept if kept <= limits.kept else None)


def shared_blocks(
    device_kind: str, devices: int, own: int, window: int | None, head_size: int = LANES, group: int = 1
) -> Blocks:
    """Return the blocks for sequences that devices share, two chunks each; blocks divide a chunk.

    - `own`: tokens of two chunks, each a multiple of `LANES`
    """
    most = blocks_for(device_kind, devices * own, window, head_size).block.size
    size = max(size for size in range(LANES, most + 1, LANES) if own // 2 % size == 0)
    found = blocks_for(device_kind, own, window, head_size, group)
    return replace(found, length=devices * own, block=Block.of(size))


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
