"""How many bytes a parameter costs on the wire, by the name of its codec.

This is the one place where the simulation's codecs have their sizes. A codec that is not in the table is used by giving
its `Payload` (or just its bytes per parameter) to the schedule functions in `gregale.timeline.methods`.
"""

from dataclasses import dataclass

from gregale.errors import UserError


@dataclass(frozen=True)
class Payload:
    """A wire format: so many bits a value, and one scale of so many bits for each block of values.

    bytes per parameter = (bits + scale_bits / block) / 8

    Attributes:
        bits: bits of one value.
        block: values that share one scale.
        scale_bits: bits of that scale, 0 for a format without scales.
    """

    bits: int
    block: int = 1
    scale_bits: int = 0

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of one value with its part of the scale; blocks are taken as full."""
        return (self.bits + self.scale_bits / self.block) / 8


PAYLOADS = {
    "float32": Payload(bits=32),
    "bfloat16": Payload(bits=16),
    "int8": Payload(bits=8, block=64, scale_bits=16),
    "int4": Payload(bits=4, block=64, scale_bits=16),
    "e3m0": Payload(bits=4, block=64, scale_bits=16),
    # The Streaming DiLoCo paper counts a quarter of bfloat16 and no scales.
    "4bit": Payload(bits=4),
}


def bytes_per_parameter(codec: str) -> float:
    """Bytes that one parameter costs on the wire under the codec of that name.

    Raises:
        UserError: no codec of that name is known.
    """
    if codec not in PAYLOADS:
        raise UserError(f"codec: {codec!r} is not a known wire format; choose one of {', '.join(PAYLOADS)}.")
    return PAYLOADS[codec].bytes_per_parameter
