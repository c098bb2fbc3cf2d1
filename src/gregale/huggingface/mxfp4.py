"""Provides tensors in MXFP4 (the OCP microscaling formats), decoded: those of the experts of a gpt-oss.

A folder has NAME [experts, inputs, outputs] as NAME_blocks [experts, outputs, inputs / 32, 16] and NAME_scales
[experts, outputs, inputs / 32]. A byte of a block has two inputs of 4 bits, the low ones first: a sign, two bits of an
exponent, one of a mantissa. The scale is 2^(byte - 127), and NaN for 255. bfloat16 holds each value exactly.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from gregale.errors import UserError
from gregale.huggingface.safetensors import BLOCKS, SCALES, Tensor

SIZE = 32  # values of a block
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.array([*POSITIVE, *(-value for value in POSITIVE)], np.float32)
FACTORS = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))  # of a block, by its scale


@dataclass(frozen=True)
class Packed(Tensor):
    """A tensor in MXFP4; its dtype and shape are those of its decoded values."""

    blocks: Tensor
    scales: Tensor

    def decoded(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield each expert and its values, bfloat16 [inputs, outputs]."""
        for expert, of_expert in enumerate(zip(self.blocks.mapped(), self.scales.mapped(), strict=True)):
            yield expert, decoded(*map(np.asarray, of_expert)).T


def decoded(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the values of blocks, bfloat16: [..., blocks, 16] and [..., blocks] -> [..., blocks * 32]."""
    halves = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, SIZE)
    with np.errstate(over="ignore"):
        found = VALUES[halves] * FACTORS[scales][..., None]
    return found.astype(ml_dtypes.bfloat16).reshape(*scales.shape[:-1], -1)


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a folder's tensors with one `Packed` in place of each pair of blocks and scales."""
    found = dict(tensors)
    for name in [name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS)]:
        if name + SCALES not in found:
            continue  # the caller names what the folder lacks
        blocks, scales = found.pop(name + BLOCKS), found.pop(name + SCALES)
        if len(blocks.shape) != 4 or blocks.shape[-1] != SIZE // 2 or scales.shape != blocks.shape[:-1]:
            raise UserError(
                f"{blocks.path}: {blocks.name} has the shape {list(blocks.shape)} and {scales.name} "
                f"{list(scales.shape)}; in MXFP4 they are [experts, outputs, n, {SIZE // 2}] and [experts, outputs, n]."
            )
        experts, outputs, count, _ = blocks.shape
        shape, dtype = (experts, count * SIZE, outputs), np.dtype(ml_dtypes.bfloat16)
        found[name] = Packed(blocks.path, name, dtype, shape, blocks.begin, blocks, scales)
    return found
