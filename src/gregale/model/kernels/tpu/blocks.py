"""Sizes of the attention kernels' blocks, by chip, length and window."""

from dataclasses import dataclass, replace

LANES = 128  # values in a row of a vector unit; blocks are multiples of it
COMPUTED = (512, 384, 256, 128)  # keys of a block in one computation: the largest divisor
DIAGONAL = (256, 384, 128)  # the same for blocks at the diagonal

# Rows of a block, as its scratch fits a kernel's share of vector memory without an option of the compiler. 2048 would
# need `xla_tpu_scoped_vmem_limit_kib` on the chips that are not named.
ROWS = 1024
LARGE_ROWS = {"TPU v6 lite": 2048, "TPU7x": 2048}
LARGE_FROM = 8192  # tokens; in shorter rows large blocks compute more masked scores than they save

LARGEST_HEAD_SIZE = 256  # for which these blocks fit, in bfloat16 and in float32
FEWEST_IN_WINDOW = 512  # smaller blocks cost more in overhead than a narrow window saves

MIB = 2**20
# Bytes of vector memory for the float32 gradients by queries of a group of heads, which the fused backward pass keeps.
KEPT_GRADIENTS = {"TPU v5 lite": 64 * MIB, "TPU v6 lite": 64 * MIB}
KEPT_ELSEWHERE = 16 * MIB
WORKING = 32 * MIB  # beside them, for blocks, sums and scores


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
    - `forward`, `backward`: of the passes
    - `vector_memory`: bytes for the fused backward kernel, which computes dq together with dk and dv; None: two kernels
      do
    """

    length: int
    forward: Block
    backward: Block
    vector_memory: int | None

    @property
    def fused(self) -> bool:
        return self.vector_memory is not None


def blocks_for(device_kind: str, length: int, window: int | None, head_size: int = LANES, group: int = 1) -> Blocks:
    """Return the blocks for rows of `length` tokens on a chip, of equal size and as few as the maximum size allows.

    Blocks are as even as their multiples allow, which keeps padding small, and hardly longer than a window. They are
    half as long for heads wider than one row of lanes.

    - `group`: heads of queries to a head of keys
    """
    most = LARGE_ROWS.get(device_kind, ROWS) if length >= LARGE_FROM else ROWS
    if head_size > LANES:
        most = most // 2
    if window is not None:
        most = min(most, max(FEWEST_IN_WINDOW, _up(window, 2 * LANES)))
    count = -(-length // most)
    size = -(-length // count)
    size = _up(size, LANES if size <= COMPUTED[0] else 2 * LANES)
    block, length = Block.of(size), _up(length, size)
    return Blocks(length, block, block, _kept(device_kind, group * length * _up(head_size, LANES) * 4))


def shared_blocks(
    device_kind: str, devices: int, own: int, window: int | None, head_size: int = LANES, group: int = 1
) -> Blocks:
    """Return the blocks for sequences that devices share, two chunks each; blocks divide a chunk.

    - `own`: tokens of two chunks, each a multiple of `LANES`
    """
    found = blocks_for(device_kind, devices * own, window, head_size, group)
    size = max(size for size in range(LANES, found.forward.size + 1, LANES) if own // 2 % size == 0)
    kept = _kept(device_kind, group * own * _up(head_size, LANES) * 4)
    return replace(found, length=devices * own, forward=Block.of(size), backward=Block.of(size), vector_memory=kept)


def _kept(device_kind: str, gradients: int) -> int | None:
    """Return the vector memory of a backward kernel that keeps this many bytes of gradients; None: too many."""
    return WORKING + gradients if gradients <= KEPT_GRADIENTS.get(device_kind, KEPT_ELSEWHERE) else None


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
