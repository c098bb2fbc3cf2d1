"""The choice of the codecs for the slow link."""

from collections.abc import Callable
from dataclasses import dataclass

from gregale.codecs.blocks import PowersCodec, RotatedCodec, UniformCodec
from gregale.codecs.codec import Codec, FloatCodec
from gregale.codecs.formats import BLOCK_BITS, CODECS, DEFAULT_BLOCK, FLOAT_BITS, WireFormat, wire_format
from gregale.errors import UserError
from gregale.settings import DECAY, Settings, setting, whole

# The choices of each phase: names, and for a codec of one's own the function that makes it.
Make = Callable[[int], Codec]
FIRST_LEGS: dict[str, Make | None] = dict.fromkeys(CODECS)
SECOND_LEGS: dict[str, Make | None] = dict.fromkeys(("none", "bfloat16", "int8", "int4"))


def register_codec(name: str, make: Make) -> None:
    """Add a codec to the choices of `reduce.codec` and `reduce.gather_codec`.

    - `make`: returns the codec for `reduce.block`, the number of values that share a scale

    Raises `ValueError` for a name that is taken.
    """
    if FIRST_LEGS.get(name, make) is not make:
        raise ValueError(f"Cannot register the codec {name}: the name is taken")
    FIRST_LEGS[name] = SECOND_LEGS[name] = make


@dataclass(frozen=True)
class FeedbackConfig(Settings):
    """Error feedback (LoCo, 2407.04480): the quantisation error is kept and added to the next message.

    The kept error is `beta * old + (1 - beta) * new`.
    """

    beta: float = setting(0.8, "decay of the kept error; 0: the last step's", range=DECAY)
    reset_every: int | None = setting(None, "steps after which it is zeroed; null: never", range=whole(1))


@dataclass(frozen=True)
class ReduceConfig(Settings):
    """The average over replicas: phase 1 is an all-to-all of shards, phase 2 an all-gather of the averages."""

    codec: str = setting(
        "none", "codec of the first phase", choices=FIRST_LEGS, aliases=("compression", "quantization")
    )
    block: int = setting(
        DEFAULT_BLOCK, "values that share a scale", range=whole(1), aliases=("block_size", "group_size")
    )
    feedback: FeedbackConfig | None = setting(
        FeedbackConfig(), "error feedback; null: none", aliases=("error_feedback",)
    )
    gather_codec: str = setting("none", "codec of the second phase", choices=SECOND_LEGS)
    hadamard: bool = setting(False, "rotate blocks before quantisation")
    measure: bool = setting(False, "at evaluations, measure what quantising loses")

    def __post_init__(self):
        super().__post_init__()
        for name in (self.codec, self.gather_codec):
            self._check_block(name)
        if self.measure and self.codec == "none":
            raise UserError(
                "reduce.measure is true, but reduce.codec is 'none': the first phase loses nothing. Choose a codec: "
                f"{', '.join(list(FIRST_LEGS)[1:])}."
            )
        if self.hadamard and not {self.codec, self.gather_codec} & set(BLOCK_BITS):
            raise UserError(
                f"reduce.hadamard is true, but codec {self.codec} and gather_codec {self.gather_codec} have no blocks "
                f"to rotate; codecs with blocks: {', '.join(BLOCK_BITS)}."
            )
        if self.hadamard and self.block.bit_count() != 1:
            below = 2 ** (self.block.bit_length() - 1)
            raise UserError(
                f"reduce.block is {self.block}, and reduce.hadamard rotates blocks of a power of two; {below} or "
                f"{2 * below} would work."
            )

    @property
    def quantised(self) -> bool:
        """Return whether any phase is not exact."""
        return self.codec != "none" or self.gather_codec != "none"

    @property
    def bytes_per_parameter(self) -> float:
        """Return the bytes of a parameter on the wire: the mean of the two phases, with full blocks."""
        return sum(self._format(name).bytes_per_parameter for name in (self.codec, self.gather_codec)) / 2

    def first_codec(self) -> Codec:
        return self._codec(self.codec)

    def second_codec(self) -> Codec:
        return self._codec(self.gather_codec)

    def _format(self, name: str) -> WireFormat:
        """Return a codec's format, without an array library for those of this package."""
        make = FIRST_LEGS[name]
        return wire_format(name, self.block) if make is None else make(self.block).format

    def _codec(self, name: str) -> Codec:
        if (make := FIRST_LEGS[name]) is not None:
            return make(self.block)
        if name in FLOAT_BITS:
            return FloatCodec(name)
        codec = PowersCodec(block=self.block) if name == "e3m0" else UniformCodec(BLOCK_BITS[name], self.block)
        return RotatedCodec(codec) if self.hadamard else codec

    def _check_block(self, name: str):
        if name not in BLOCK_BITS:
            return
        per_byte = 8 // BLOCK_BITS[name]
        if self.block % per_byte:
            above = -(-self.block // per_byte) * per_byte
            raise UserError(
                f"reduce.block is {self.block}: {name} packs {per_byte} value(s) into a byte, so a block is a multiple "
                f"of {per_byte} values. {above} would work; {DEFAULT_BLOCK} is the default."
            )
