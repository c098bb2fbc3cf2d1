"""Sizes of the splash kernels' blocks, by chip, length and window."""

from dataclasses import dataclass

LANES = 128  # values in a row of a vector unit; blocks are multiples of it
COMPUTED = (512, 384, 256, 128)  # keys of a block in one computation: the largest divisor

# Rows of a block, as its scratch fits a kernel's share of vector memory without an option of the compiler. 2048 would
# need `xla_tpu_scoped_vmem_limit_kib` on the chips that are not named.
ROWS = 1024
LARGE_ROWS = {"TPU v6 lite": 2048, "TPU7x": 2048}
LARGE_FROM = 8192  # tokens; in shorter rows large blocks compute more masked scores than they save

# Keys of a block in the fused backward pass, which gives a gradient by queries for each of them, to be added up after.
# Fewer and larger ones mean fewer of these; beyond this more is computed of what the mask hides than that saves.
BACKWARD_KEYS = 2048

LARGEST_HEAD_SIZE = 256  # for which these blocks fit, in bfloat16 and in float32

FUSED_UP_TO = 8192  # tokens; the fused backward pass keeps a dq for each block of keys: 8 GiB at 32k of an 8B model
FEWEST_IN_WINDOW = 512  # smaller blocks cost more in overhead than a narrow window saves


@dataclass(frozen=True)
class Blocks:
    """The division of a row of tokens."""

    length: int  # tokens of a row, padded to whole blocks
    size: int  # tokens of a block, of queries and of keys
    compute: int  # keys of a block in one computation
    backward: int  # keys of a block in the backward pass
    fused: bool  # the backward pass computes dq together with dk and dv


def blocks_for(device_kind: str, length: int, window: int | None, head_size: int = LANES) -> Blocks:
    """Return the blocks for rows of `length` tokens on a chip, of equal size and as few as the maximum size allows.

    Blocks are as even as their multiples allow, which keeps padding small, and hardly longer than a window. They are
    half as long for heads wider than one row of lanes. In a fused backward pass without a window two of them form one
    block of keys, if they are small enough, even in number, and at least four.
    """
    most = LARGE_ROWS.get(device_kind, ROWS) if length >= LARGE_FROM else ROWS
    most_keys = BACKWARD_KEYS
    if head_size > LANES:
        most, most_keys = most // 2, most_keys // 2
    if window is not None:
        most = min(most, max(FEWEST_IN_WINDOW, _up(window, 2 * LANES)))
    count = -(-length // most)
    size = -(-length // count)
    size = _up(size, LANES if size <= COMPUTED[0] else 2 * LANES)
    compute = next(keys for keys in COMPUTED if size % keys == 0)
    count, fused = -(-length // size), length <= FUSED_UP_TO
    paired = fused and window is None and count >= 4 and count % 2 == 0 and 2 * size <= most_keys
    return Blocks(count * size, size, compute, 2 * size if paired else size, fused)


def shared_blocks(device_kind: str, chunk: int, devices: int, window: int | None, head_size: int = LANES) -> Blocks:
    """Return the blocks for sequences that devices share, two chunks of `chunk` tokens each; blocks divide a chunk.

    - `chunk`: a multiple of `LANES`
    """
    most = blocks_for(device_kind, 2 * devices * chunk, window, head_size).size
    size = max(size for size in range(LANES, most + 1, LANES) if chunk % size == 0)
    compute = next(keys for keys in COMPUTED if size % keys == 0)
    return Blocks(2 * devices * chunk, size, compute, size, fused=False)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
