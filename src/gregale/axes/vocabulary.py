"""Decisions from shapes about embedding and head, for the model and for the closed forms of traffic and memory."""

from typing import NamedTuple

INTEGER, FLOAT32 = 4, 4  # bytes
MOST_BLOCKS = 4  # of a group, if its memory adds to that of the table: `compute.loss_block` limits both
ALIGNED = 64  # tokens of a block are a multiple of it, or of a 16th of `compute.loss_block` if that is less


def exchanges_rows(tokens: int, embed: int, vocabulary: int, width: int, devices: int) -> bool:
    """Return whether a lookup sends rows to their tokens, and gradients back to rows, instead of gathering the table.

    Each of `devices` devices has some columns of the table. In the first form it gathers the other columns, vocabulary
    * embed values, and sums the gradient of the whole table on the way back. In the second form it gathers the ids of
    the other devices and looks up its columns of all their tokens. An all-to-all of tokens * embed values completes the
    rows; another returns the gradients to the columns. A device sends the same share of each payload, so payloads are
    compared.

    - `tokens`: on a device, in a microbatch
    - `vocabulary`: rows of the table on a device
    - `width`: bytes of a value of the compute dtype
    """
    return devices > 1 and tokens * (embed * width + devices * INTEGER) < vocabulary * embed * width


class LossBlocks(NamedTuple):
    """The division of a device's tokens for the loss: groups of blocks of tokens, padded at the end.

    - `block`: tokens whose logits are computed at a time
    - `blocks`: blocks of a group; the gradients by logits of all its tokens are in memory, in the compute dtype
    """

    groups: int
    blocks: int
    block: int

    @property
    def group(self) -> int:
        """Return the tokens of a group."""
        return self.blocks * self.block

    @property
    def tokens(self) -> int:
        """Return the number of tokens, padding included."""
        return self.groups * self.group


def loss_blocks(tokens: int, embed: int, width: int, block: int, fused: bool = False) -> LossBlocks:
    """Return the groups and blocks of the loss.

    The gradient by head is one product for each group. Several groups are summed in a float32 table [embed,
    vocabulary], which each group reads and writes once; a single group needs no table. So all tokens are one group if
    their gradients by logits take no more memory than the table. Otherwise a group takes at most half of it, with 1 to
    `MOST_BLOCKS` blocks; if logits are never in memory in float32, it is one block, and takes the memory of a block's.
    Blocks have equal sizes that are multiples of at most `ALIGNED`, so padding is less than an eighth of the tokens.

    - `tokens`: on a device, in a microbatch
    - `width`: bytes of a value of the compute dtype
    - `block`: the most tokens whose logits are in memory in float32
    - `fused`: a group's exponentials are computed with their product, see `gregale.model.execution.Execution`
    """
    block = min(block, tokens)
    aligned = max(1, min(ALIGNED, block // 16))
    instead_of_table, most = embed * FLOAT32 // width, FLOAT32 // width if fused else MOST_BLOCKS
    limit = tokens if tokens <= instead_of_table else max(block, min(instead_of_table // 2, most * block))
    if fused:
        block = limit
    groups = 1 if limit == tokens else _ceil(tokens, limit // block * block)
    blocks = _ceil(tokens, groups * block)
    return LossBlocks(groups, blocks, min(block, aligned * _ceil(tokens, groups * blocks * aligned)))


def _ceil(count: int, parts: int) -> int:
    return -(-count // parts)
