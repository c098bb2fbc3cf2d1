"""Wire formats: the bytes of a message in closed form. Plain arithmetic, so that planning needs no array library."""

from dataclasses import dataclass

DEFAULT_BLOCK = 64
SCALE_BITS = 16  # a block's scale is one bfloat16
FLOAT_BITS = {"none": 32, "bfloat16": 16}
BLOCK_BITS = {"int8": 8, "int4": 4, "int2": 2, "e3m0": 4}
CODECS = (*FLOAT_BITS, *BLOCK_BITS)


@dataclass(frozen=True)
class WireFormat:
    """A number of bits for each value, and one scale for each block of values.

    bytes per parameter = (bits + scale_bits / block) / 8

    - `bits`: bits of one value
    - `block`: values that share one scale
    - `scale_bits`: bits of that scale, 0 for a format without scales
    """

    bits: int
    block: int = 1
    scale_bits: int = 0

    @property
    def bytes_per_parameter(self) -> float:
        """Return the bytes of one value with its part of the scale, for full blocks."""
        return (self.bits + self.scale_bits / self.block) / 8

    def message_bytes(self, size: int) -> int:
        """Return the bytes of the message of `size` values: ceil(size / block) * (block * bits + scale_bits) / 8.

        An incomplete last block is sent whole.
        """
        blocks = -(-size // self.block)
        return blocks * (self.block * self.bits + self.scale_bits) // 8


def wire_format(codec: str, block: int = DEFAULT_BLOCK) -> WireFormat:
    """Return the format of a codec of `CODECS`; a codec without scales has no blocks."""
    if codec in FLOAT_BITS:
        return WireFormat(FLOAT_BITS[codec])
    return WireFormat(BLOCK_BITS[codec], block, SCALE_BITS)
