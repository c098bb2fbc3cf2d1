"""What is decided from shapes about the two weights that have the vocabulary: embedding and head.

The model runs by these decisions, and the closed forms of traffic and memory count by them.
"""

from __future__ import annotations

from typing import NamedTuple

INTEGER, FLOAT32 = 4, 4  # bytes
MOST_BLOCKS = 4  # of a group, where the memory for it is beside the table: `compute.loss_block` bounds both


def exchanges_rows(tokens: int, embed: int, vocabulary: int, width: int, devices: int) -> bool:
    """Whether a lookup brings rows to their tokens, and gradients back to rows, instead of the table to the tokens.

    Each of `devices` devices has some columns of the table. Either it gathers the others', vocabulary * embed values,
    and its gradient of the whole table is summed on the way back. Or it gathers the others' ids, looks up its columns
    of all their tokens, and an all-to-all of tokens * embed values makes whole rows of them; and one takes the
    gradients back to the columns. Of all these a device sends the same share, so the payloads are compared.

    Arguments:
    - `tokens`: on a device, in a microbatch
    - `vocabulary`: rows of the table on a device
    - `width`: bytes of a value of the compute dtype
    """
    return devices > 1 and tokens * (embed * width + devices * INTEGER) < vocabulary * embed * width


class LossBlocks(NamedTuple):
    """How the loss cuts a device's tokens: groups of blocks of tokens, the last ones filled up.

    - `block`: tokens whose logits are held at a time, in float32
    - `blocks`: of a group, for all tokens of which the gradients by logits are held at a time, in the compute dtype
    """

    groups: int
    blocks: int
    block: int

    @property
    def group(self) -> int:
        """Tokens of a group."""
        return self.blocks * self.block

    @property
    def tokens(self) -> int:
        """Tokens, filling included."""
        return self.groups * self.group


def loss_blocks(tokens: int, embed: int, width: int, block: int) -> LossBlocks:
    """The groups and blocks of the loss.

    The gradient by head is one product for each group. With more than one they are added up in a float32 table
    [embed, vocabulary], which is read and written once a group; with one there is no such table. So all tokens are one
    group if their gradients by logits take no more memory than the table would. Else a group's take half of it at most,
    and are those of `MOST_BLOCKS` blocks at most; those of one block in any case.

    Arguments:
    - `tokens`: on a device, in a microbatch
    - `width`: bytes of a value of the compute dtype
    - `block`: see `LossBlocks`; fewer if there are fewer tokens
    """
    block = min(block, tokens)
    instead_of_table = embed * FLOAT32 // width
    most = tokens if tokens <= instead_of_table else min(instead_of_table // 2, MOST_BLOCKS * block)
    groups = -(-tokens // max(block, most))
    return LossBlocks(groups, -(-tokens // (groups * block)), block)
