"""Codecs: blocks of values in few bits with a scale each, or their largest values; configuration and error feedback."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gregale.errors import UserError
from gregale.settings import DECAY, Settings, setting, whole

DEFAULT_BLOCK = 64
SCALE_BITS = 16  # a block's scale is one bfloat16
FLOAT_BITS = {"none": 32, "bfloat16": 16}
BLOCK_BITS = {"int8": 8, "int4": 4, "int2": 2, "e3m0": 4}
CODECS = (*FLOAT_BITS, *BLOCK_BITS, "topk")
LARGEST_TOPK_BLOCK = 4096  # a place in a block takes 12 bits
MAGNITUDES = 4  # of the values of a block that `topk` sends


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


@dataclass(frozen=True)
class SparseFormat(WireFormat):
    """The `keep` largest of `block` values: 13 bits each, and up to four magnitudes of `scale_bits`."""

    keep: int = LARGEST_TOPK_BLOCK // 64

    @property
    def bytes_per_parameter(self) -> float:
        return self.message_bytes(self.block) / self.block

    def message_bytes(self, size: int) -> int:
        """Return the bytes of the message of `size` values; an incomplete last block has its share of `keep`."""
        blocks, rest = divmod(size, self.block)
        return blocks * self._block_bytes(self.block) + (self._block_bytes(rest) if rest else 0)

    def kept(self, size: int) -> int:
        """Return how many values of a block of `size` are sent: ceil(keep * size / block)."""
        return -(-self.keep * size // self.block)

    def ends(self, size: int) -> tuple[int, int, int]:
        """Return where the places, signs and magnitudes end in the bytes of a block of `size`."""
        kept = self.kept(size)
        places = 3 * -(-kept // 2)
        signs = places + -(-kept // 8)
        return places, signs, signs + min(kept, MAGNITUDES) * self.scale_bits // 8

    def _block_bytes(self, size: int) -> int:
        return self.ends(size)[-1]


def wire_format(codec: str, block: int | None = None, keep: int | None = None) -> WireFormat:
    """Return the format of a codec of `CODECS`; a codec without scales has no blocks.

    - `block`, `keep`: as in `ReduceConfig`; None: the default
    """
    if codec in FLOAT_BITS:
        return WireFormat(FLOAT_BITS[codec])
    if codec == "topk":
        block = block or LARGEST_TOPK_BLOCK
        return SparseFormat(1, block, SCALE_BITS, keep or -(-block // 64))
    return WireFormat(BLOCK_BITS[codec], block or DEFAULT_BLOCK, SCALE_BITS)


class Codec(ABC):
    """Pure functions between values [..., n] and messages [..., message_bytes(n)], one message for each row.

    A row with a value that is not finite decodes to a row with a value that is not finite.
    """

    @property
    @abstractmethod
    def format(self) -> WireFormat:
        """Return the message's size in closed form."""

    @abstractmethod
    def encode(self, values: jax.Array) -> jax.Array:
        """Encode values [..., n], float32 or bfloat16, to uint8 [..., message_bytes(n)]."""

    @abstractmethod
    def decode(self, message: jax.Array, size: int) -> jax.Array:
        """Decode uint8 [..., message_bytes(size)] to float32 [..., size]."""

    def message_bytes(self, size: int) -> int:
        return self.format.message_bytes(size)

    def next_error(self, error: jax.Array, lost: jax.Array, beta: float) -> jax.Array:
        """Return the error that is added to the next values: `beta * error + (1 - beta) * lost` (LoCo, 2407.04480).

        - `error`: that was added to these
        - `lost`: these with the error, less what was sent
        """
        return beta * error + (1 - beta) * lost


@dataclass(frozen=True)
class FloatCodec(Codec):
    """The values' own bytes: float32 (`none`, exact) or bfloat16 (relative error of at most 2^-8).

    - `name`: `none` or `bfloat16`; values from (2 - 2^-8) 2^127 (3.396e38) become infinite there
    """

    name: str

    @property
    def format(self) -> WireFormat:
        return WireFormat(FLOAT_BITS[self.name])

    @property
    def _dtype(self):
        return jnp.bfloat16 if self.name == "bfloat16" else jnp.float32

    def encode(self, values: jax.Array) -> jax.Array:
        octets = jax.lax.bitcast_convert_type(values.astype(self._dtype), jnp.uint8)  # [..., n, bytes of a value]
        return octets.reshape(*values.shape[:-1], -1)

    def decode(self, message: jax.Array, size: int) -> jax.Array:
        octets = message.reshape(*message.shape[:-1], size, self.format.bits // 8)
        return jax.lax.bitcast_convert_type(octets, self._dtype).astype(jnp.float32)


SMALLEST_SCALE = float(jnp.finfo(jnp.float32).tiny)  # 2^-126; some devices flush smaller values to 0
LARGEST_BFLOAT16 = float(jnp.finfo(jnp.bfloat16).max)
SCALE_BYTES = SCALE_BITS // 8


@dataclass(frozen=True)
class BlockCodec(Codec):
    """A block's value of the largest magnitude, x_max, sets the scale; every value becomes a code of `bits` bits.

        scale = bfloat16(-x_max / levels)    code = nearest(x / scale)    decoded = scale * value(code)

    The scale carries the sign that makes x_max the code for -levels: a two's complement range has that code, but none
    for +levels. (Of two values x and -x of the largest magnitude x_max is the negative one.) The scale is rounded
    before the values are quantised, so that sender and receivers decode equal values. A block whose |x_max| / levels is
    below 2^-126 decodes to zeros; one with a value that is not finite, or beyond 3.39e38 (beyond 1.7e38 with 2 bits),
    decodes to NaN throughout.

    The message is one block after the other: its packed codes, then the two bytes of its scale. (With all scales at the
    end XLA's code for CPUs is four times slower.) The j-th values of a block's `8 / bits` equal parts share byte j, the
    first part in the lowest bits.

    - `bits`: 8, 4 or 2
    - `block`: values that share a scale; a multiple of `8 / bits`
    """

    bits: int
    block: int = DEFAULT_BLOCK

    @property
    def format(self) -> WireFormat:
        return WireFormat(self.bits, self.block, SCALE_BITS)

    @property
    @abstractmethod
    def levels(self) -> int:
        """Return the largest magnitude of a code's value."""

    @abstractmethod
    def codes(self, scaled: jax.Array) -> jax.Array:
        """Return the codes of values in units of the scale, uint8 below 2^bits."""

    @abstractmethod
    def values(self, codes: jax.Array) -> jax.Array:
        """Return the float32 values of uint8 codes, in units of the scale."""

    def quantise(self, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return codes uint8 [..., block] and scales float32 [...], exact in bfloat16, of float32 [..., block]."""
        scales = self.scales(blocks)
        inverse = jnp.where(scales == 0, 0, 1 / scales)
        return self.codes(blocks * inverse[..., None]), scales

    def dequantise(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
        """Return float32 [..., block] of codes uint8 [..., block] and scales [...]."""
        return self.values(codes) * scales.astype(jnp.float32)[..., None]

    def scales(self, blocks: jax.Array) -> jax.Array:
        """Return the signed scales [...] of float32 [..., block], rounded as on the wire."""
        high, low = jnp.max(blocks, axis=-1), jnp.min(blocks, axis=-1)
        # On CPUs XLA's maximum over many rows drops NaN.
        x_max = jnp.where(jnp.any(jnp.isnan(blocks), axis=-1), jnp.nan, jnp.where(high > -low, high, low))
        scales = x_max / -self.levels
        magnitude = jnp.abs(scales)
        # Beyond this limit a decoded value, or the scale's reciprocal, would not be a normal float.
        limit = min(LARGEST_BFLOAT16 / self.levels, 1 / SMALLEST_SCALE)
        kept = jnp.where(magnitude <= limit, scales, jnp.nan)
        # A pair of converts to bfloat16 and back would be optimised away.
        return jax.lax.reduce_precision(jnp.where(magnitude < SMALLEST_SCALE, 0, kept), 8, 7)

    def encode(self, values: jax.Array) -> jax.Array:
        *rows, size = values.shape
        padding = -size % self.block
        if padding:
            values = jnp.pad(values, [(0, 0)] * len(rows) + [(0, padding)])
        codes, scales = self.quantise(values.astype(jnp.float32).reshape(*rows, -1, self.block))
        scale_bytes = jax.lax.bitcast_convert_type(scales.astype(jnp.bfloat16), jnp.uint8)  # [..., blocks, 2]
        return jnp.concatenate([self.pack(codes), scale_bytes], axis=-1).reshape(*rows, -1)

    def decode(self, message: jax.Array, size: int) -> jax.Array:
        *rows, _ = message.shape
        message = message.reshape(*rows, -1, self.format.message_bytes(self.block))
        packed, scale_bytes = jnp.split(message, [message.shape[-1] - SCALE_BYTES], axis=-1)
        scales = jax.lax.bitcast_convert_type(scale_bytes, jnp.bfloat16)
        return self.dequantise(self.unpack(packed), scales).reshape(*rows, -1)[..., :size]

    def pack(self, codes: jax.Array) -> jax.Array:
        """Pack [..., block] codes into [..., block * bits / 8] bytes."""
        packed = jnp.zeros((), jnp.uint8)
        for place, part in enumerate(jnp.split(codes, 8 // self.bits, axis=-1)):
            packed = packed | (part << (self.bits * place))
        return packed

    def unpack(self, packed: jax.Array, axis: int = -1) -> jax.Array:
        """Unpack the block * bits / 8 bytes along an axis to the codes of a block.

        It is a shift of a broadcast, which compiles to one loop.
        """
        axis = axis % packed.ndim
        shifts = jnp.arange(0, 8, self.bits, dtype=jnp.uint8).reshape(-1, *[1] * (packed.ndim - axis))
        parts = (jnp.expand_dims(packed, axis) >> shifts) & (2**self.bits - 1)
        return parts.reshape(*packed.shape[:axis], self.block, *packed.shape[axis + 1 :])


@dataclass(frozen=True)
class UniformCodec(BlockCodec):
    """Codes are the integers from -2^(bits-1) to 2^(bits-1) - 1, sent with 2^(bits-1) added.

    |x - decoded| <= |scale| / 2, and at the end opposite to x_max, where a value is clipped, |scale| (1 + levels 2^-8):
    the scale is rounded, so |x_max| can be levels (1 + 2^-8) scales.
    """

    @property
    def levels(self) -> int:
        return 2 ** (self.bits - 1)

    def codes(self, scaled: jax.Array) -> jax.Array:
        return jnp.clip(jnp.round(scaled) + self.levels, 0, 2 * self.levels - 1).astype(jnp.uint8)

    def values(self, codes: jax.Array) -> jax.Array:
        return codes.astype(jnp.float32) - self.levels


@dataclass(frozen=True)
class PowersCodec(BlockCodec):
    """`e3m0`: a sign and three exponent bits; the codes' values are 0 and plus or minus 2^-3 ... 2^3.

    |x - decoded| <= |x| / 3 where |x| >= |scale| / 8, below that at most |scale| / 16; both up to a relative 2^-8 of
    x_max, from the rounding of the scale.
    """

    bits: int = 4

    @property
    def levels(self) -> int:
        return 8

    def codes(self, scaled: jax.Array) -> jax.Array:
        # Adding half a mantissa carries into the exponent from 1.5 on, the middle between two powers of two.
        pattern = jax.lax.bitcast_convert_type(scaled, jnp.uint32)
        exponent = ((pattern & 0x7FFFFFFF) + 0x400000) >> 23  # biased by 127
        place = jnp.clip(exponent.astype(jnp.int32) - 123, 1, 7)
        place = jnp.where(jnp.abs(scaled) < 2**-4, 0, place)
        return (place | (pattern >> 31 << 3).astype(jnp.int32)).astype(jnp.uint8)

    def values(self, codes: jax.Array) -> jax.Array:
        place = (codes & 7).astype(jnp.uint32)
        sign = (codes >> 3).astype(jnp.uint32) << 31
        pattern = jnp.where(place == 0, 0, ((place + 123) << 23) | sign)
        return jax.lax.bitcast_convert_type(pattern, jnp.float32)


def random_rotation(size: int) -> np.ndarray:
    """Return Sylvester's Hadamard matrix with random row signs, orthonormal [size, size]; `size` is a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron(matrix, [[1, 1], [1, -1]])
    signs = np.random.default_rng(0).choice([-1, 1], size)
    return (signs[:, None] * matrix / np.sqrt(size)).astype(np.float32)


@dataclass(frozen=True)
class RotatedCodec(Codec):
    """Encodes every block x with `codec` as x R, where R is a random rotation that is the same for all blocks.

    The rotation spreads one large value over its block, so the block's scale is smaller. The decoder rotates the error
    back with the same norm. Values above 3e38 / block may overflow and then decode to NaN. (As in QuIP#, 2402.04396.)

    - `codec`: its block is a power of two
    """

    codec: BlockCodec

    @property
    def format(self) -> WireFormat:
        return self.codec.format

    def encode(self, values: jax.Array) -> jax.Array:
        *rows, size = values.shape
        padded = jnp.pad(values.astype(jnp.float32), [(0, 0)] * len(rows) + [(0, -size % self.codec.block)])
        return self.codec.encode(self._turn(padded, random_rotation(self.codec.block)))

    def decode(self, message: jax.Array, size: int) -> jax.Array:
        padded = self.codec.decode(message, size + -size % self.codec.block)
        return self._turn(padded, random_rotation(self.codec.block).T)[..., :size]

    def _turn(self, values: jax.Array, rotation: np.ndarray) -> jax.Array:
        blocks = values.reshape(*values.shape[:-1], -1, self.codec.block)
        return jnp.matmul(blocks, rotation, precision=jax.lax.Precision.HIGHEST).reshape(values.shape)


@dataclass(frozen=True)
class TopKCodec(Codec):
    """`topk`: the largest values of each block by magnitude; the others decode to zero (SparseLoCo, 2508.15706).

    The values are sent in the order of their magnitude, and in four parts of (almost) equal length with one magnitude
    each, the mean of the part. So the order tells a value's magnitude, and a value takes 12 bits for its place in the
    block and one for its sign. In a block with a value that is not finite all that are sent decode to NaN, such values
    first. What is not sent waits in the error:

        h = x + e        message = encode(h)        e = beta (h - decode(message))
    """

    sparse: SparseFormat

    @property
    def format(self) -> SparseFormat:
        return self.sparse

    def encode(self, values: jax.Array) -> jax.Array:
        return jnp.concatenate([self._encode(blocks) for blocks in self._blocks(values)], axis=-1)

    def decode(self, message: jax.Array, size: int) -> jax.Array:
        full, rest = divmod(size, self.format.block)
        cut = self.format.message_bytes(size - rest)
        parts = [(message[..., :cut], full, self.format.block), (message[..., cut:], 1, rest)]
        return jnp.concatenate([self._decode(*part) for part in parts if part[1] and part[2]], axis=-1)

    def next_error(self, error: jax.Array, lost: jax.Array, beta: float) -> jax.Array:
        return beta * lost

    def _blocks(self, values: jax.Array) -> list[jax.Array]:
        """Cut [..., n] into its full blocks [..., blocks, block] and the last, shorter one [..., 1, rest]."""
        *rows, size = values.shape
        rest = size % self.format.block
        full, last = values[..., : size - rest], values[..., size - rest :]
        parts = [full.reshape(*rows, -1, self.format.block), last.reshape(*rows, 1, rest)]
        return [part.astype(jnp.float32) for part in parts if part.size]

    def _encode(self, blocks: jax.Array) -> jax.Array:
        """Encode [..., blocks, size] to uint8 [..., blocks * bytes]."""
        kept, finite = self.format.kept(blocks.shape[-1]), jnp.isfinite(blocks)
        values = jnp.where(finite & (jnp.abs(blocks) >= SMALLEST_SCALE), blocks, 0)
        _, places = jax.lax.top_k(jnp.where(finite, jnp.abs(values), jnp.inf), kept)  # of equal ones the first
        values = jnp.take_along_axis(values, places, axis=-1)
        parts = [jnp.mean(jnp.abs(values[..., start:end]), axis=-1) for start, end in _parts(kept)]
        all_finite = jnp.all(finite, axis=-1, keepdims=True)
        magnitudes = jnp.where(all_finite, jnp.stack(parts, axis=-1), jnp.nan).astype(jnp.bfloat16)
        octets = jax.lax.bitcast_convert_type(magnitudes, jnp.uint8).reshape(*places.shape[:-1], -1)
        message = jnp.concatenate([_in_bytes(places, 12), _in_bytes(values < 0, 1), octets], axis=-1)
        return message.reshape(*blocks.shape[:-2], -1)

    def _decode(self, message: jax.Array, blocks: int, size: int) -> jax.Array:
        """Decode uint8 [..., blocks * bytes] to float32 [..., blocks * size]."""
        *rows, _ = message.shape
        kept = self.format.kept(size)
        message = message.reshape(*rows, blocks, -1)
        places, signs, octets = jnp.split(message, self.format.ends(size)[:2], axis=-1)
        magnitudes = jax.lax.bitcast_convert_type(octets.reshape(*octets.shape[:-1], -1, 2), jnp.bfloat16)
        lengths = np.diff(_parts(kept)).ravel()
        sizes = jnp.repeat(magnitudes.astype(jnp.float32), lengths, axis=-1, total_repeat_length=kept)
        values = jnp.where(_from_bytes(signs, 1, kept) == 1, -sizes, sizes)
        found = jnp.zeros((*rows, blocks, size))
        found = jnp.put_along_axis(found, _from_bytes(places, 12, kept), values, axis=-1, inplace=False)
        return found.reshape(*rows, -1)


def _parts(kept: int) -> list[tuple[int, int]]:
    """Return the first and the end of each of the parts of values that have one magnitude."""
    count = min(kept, MAGNITUDES)
    return [(part * kept // count, (part + 1) * kept // count) for part in range(count)]


def _in_bytes(numbers: jax.Array, bits: int) -> jax.Array:
    """Pack integers [..., n] of `bits` bits into bytes [..., ceil(n * bits / 8)]; the lowest bit of each first.

    With 12 bits the last of an odd number of integers takes two bytes.
    """
    shifts = jnp.arange(bits)
    flat = ((numbers.astype(jnp.int32)[..., None] >> shifts) & 1).reshape(*numbers.shape[:-1], -1)
    unit = 24 if bits == 12 else 8
    flat = jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % unit)])
    eight = flat.reshape(*flat.shape[:-1], -1, 8)
    return jnp.sum(eight << jnp.arange(8), axis=-1).astype(jnp.uint8)


def _from_bytes(octets: jax.Array, bits: int, count: int) -> jax.Array:
    """Invert `_in_bytes`: return int32 [..., count]."""
    flat = ((octets.astype(jnp.int32)[..., None] >> jnp.arange(8)) & 1).reshape(*octets.shape[:-1], -1)
    numbers = flat[..., : count * bits].reshape(*octets.shape[:-1], count, bits)
    return jnp.sum(numbers << jnp.arange(bits), axis=-1)


# The choices of each phase: names, and for a codec of one's own the function that makes it.
Make = Callable[[int], Codec]
FIRST_LEGS: dict[str, Make | None] = dict.fromkeys(CODECS)
SECOND_LEGS: dict[str, Make | None] = dict.fromkeys(("none", "bfloat16", "int8", "int4", "topk"))


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
    """Error feedback: what a message lacks is kept and added to the next one (`Codec.next_error`)."""

    beta: float | None = setting(None, "decay of the kept error; null: 0.8, of topk 0.95", range=DECAY)
    reset_every: int | None = setting(None, "steps after which it is zeroed; null: never", range=whole(1))


@dataclass(frozen=True)
class ReduceConfig(Settings):
    """The average over replicas: phase 1 is an all-to-all of shards, phase 2 an all-gather of the averages.

    With `phases: 1` an all-gather of the messages takes the place of both: every replica averages all of them.
    """

    codec: str = setting("none", "the first phase", choices=FIRST_LEGS, aliases=("compression", "quantization"))
    block: int | None = setting(
        None,
        "values of a block; null: 64, of topk 4096",
        range=whole(1),
        aliases=("block_size", "group_size"),
    )
    keep: int | None = setting(None, "how many of them topk sends; null: a 64th", range=whole(1))
    feedback: FeedbackConfig | None = setting(
        FeedbackConfig(), "error feedback; null: none", aliases=("error_feedback",)
    )
    gather_codec: str | None = setting(None, "second phase; null: float32", choices=SECOND_LEGS)
    phases: int = setting(
        2, "1: everybody gets all messages, and averages them alone", range=whole(1, 2), by_topic=True
    )
    hadamard: bool = setting(False, "rotate blocks before quantisation")
    measure: bool = setting(False, "at evaluations, measure what quantising loses")

    def __post_init__(self):
        super().__post_init__()
        for name in self.names:
            self._check_block(name)
        if self.keep is not None and "topk" not in self.names:
            raise UserError(f"reduce.keep is {self.keep}, and only topk keeps a part of a block. Set it to null.")
        if self.phases == 1 and (self.codec == "none" or self.gather_codec not in (None, "none")):
            raise UserError(
                f"reduce.phases is 1, reduce.codec {self.codec} and reduce.gather_codec {self.gather_codec or 'null'}: "
                "one phase sends the messages of a codec, and no averages. Set reduce.codec to int4 or topk, and leave "
                "reduce.gather_codec out; or set reduce.phases to 2."
            )
        if self.measure and self.codec == "none":
            raise UserError(
                "reduce.measure is true, but reduce.codec is 'none': the first phase loses nothing. Choose a codec: "
                f"{', '.join(list(FIRST_LEGS)[1:])}."
            )
        if self.hadamard and not set(self.names) & set(BLOCK_BITS):
            raise UserError(
                f"reduce.hadamard is true, but codec {self.codec} and gather_codec {self.second} have no blocks "
                f"to rotate; codecs with blocks: {', '.join(BLOCK_BITS)}."
            )
        if self.hadamard and self.block_size.bit_count() != 1:
            below = 2 ** (self.block_size.bit_length() - 1)
            raise UserError(
                f"reduce.block is {self.block_size}, and reduce.hadamard rotates blocks of a power of two; {below} or "
                f"{2 * below} would work."
            )

    @property
    def resolved(self) -> "ReduceConfig":
        """Return the same with values in place of null: two configurations that are equal so send the same."""
        feedback = self.feedback and replace(self.feedback, beta=self.beta)
        return replace(self, block=self.block_size, gather_codec=self.second, feedback=feedback)

    @property
    def second(self) -> str:
        """Return the codec of the second phase."""
        if self.gather_codec is not None:
            return self.gather_codec
        return "topk" if self.codec == "topk" and self.phases == 2 else "none"

    @property
    def names(self) -> tuple[str, str]:
        """Return the codecs of both phases."""
        return self.codec, self.second

    @property
    def block_size(self) -> int:
        """Return the values of a block."""
        if self.block is not None:
            return self.block
        return LARGEST_TOPK_BLOCK if "topk" in self.names else DEFAULT_BLOCK

    @property
    def beta(self) -> float:
        """Return the decay of the kept error; 0 without feedback."""
        if self.feedback is None:
            return 0.0
        if self.feedback.beta is not None:
            return self.feedback.beta
        return 0.95 if self.codec == "topk" else 0.8

    @property
    def quantised(self) -> bool:
        """Return whether any phase is not exact."""
        return self.names != ("none", "none")

    def bytes_per_parameter(self, replicas: int) -> float:
        """Return the bytes b of a parameter, with full blocks, of which a replica sends 2 (n - 1) / n: of n replicas.

        It is the mean of the two phases. With one phase a replica sends n - 1 messages.
        """
        first, second = (self._format(name).bytes_per_parameter for name in self.names)
        return (first + second) / 2 if self.phases == 2 else first * replicas / 2

    def first_codec(self) -> Codec:
        return self._codec(self.codec)

    def second_codec(self) -> Codec:
        return self._codec(self.second)

    def _format(self, name: str) -> WireFormat:
        """Return a codec's format, without an array library for those of this package."""
        make = FIRST_LEGS[name]
        return wire_format(name, self.block_size, self.keep) if make is None else make(self.block_size).format

    def _codec(self, name: str) -> Codec:
        if (make := FIRST_LEGS[name]) is not None:
            return make(self.block_size)
        if name in FLOAT_BITS:
            return FloatCodec(name)
        if isinstance(found := self._format(name), SparseFormat):
            return TopKCodec(found)
        block = self.block_size
        codec = PowersCodec(block=block) if name == "e3m0" else UniformCodec(BLOCK_BITS[name], block)
        return RotatedCodec(codec) if self.hadamard else codec

    def _check_block(self, name: str):
        if name == "topk" and not (self.keep or 1) <= self.block_size <= LARGEST_TOPK_BLOCK:
            raise UserError(
                f"reduce.block is {self.block_size} and reduce.keep {self.keep or 'null'}: topk sends some values of a "
                f"block, and a place in it takes 12 bits, so keep <= block <= {LARGEST_TOPK_BLOCK}."
            )
        if name not in BLOCK_BITS:
            return
        per_byte = 8 // BLOCK_BITS[name]
        if self.block_size % per_byte:
            above = -(-self.block_size // per_byte) * per_byte
            raise UserError(
                f"reduce.block is {self.block_size}: {name} packs {per_byte} value(s) into a byte, so a block is a "
                f"multiple of {per_byte} values. {above} would work; {DEFAULT_BLOCK} is the default."
            )


class QuantisedArray(NamedTuple):
    """An array of any shape in 8 bits: codes of the same shape, and scales for blocks along its last dimension.

    All-zero codes and scales represent zeros.
    """

    codes: Any  # uint8 [..., n]
    scales: Any  # bfloat16 [..., n / block]


def stored_block(size: int) -> int:
    """Return the block for a last dimension of `size`: its smallest divisor from 64 on, or all of it."""
    return next((block for block in range(DEFAULT_BLOCK, size) if size % block == 0), size)


def store(values: jax.Array, block: int) -> QuantisedArray:
    """Return float32 [..., n] in 8 bits: an error of at most (1 + 2^-8) / 256 of the largest magnitude of its block.

    A clipped value, almost as large and of the other sign, has an error of at most 3/256 of it.
    """
    codec = UniformCodec(bits=8, block=block)
    codes, scales = codec.quantise(values.reshape(*values.shape[:-1], -1, codec.block))
    return QuantisedArray(codes.reshape(values.shape), scales.astype(jnp.bfloat16))


def load(stored: QuantisedArray) -> jax.Array:
    """Return the stored values as float32."""
    codes, scales = stored
    codec = UniformCodec(bits=8, block=codes.shape[-1] // scales.shape[-1])
    blocks = codes.reshape(*scales.shape, codec.block)
    return codec.dequantise(blocks, scales).reshape(codes.shape)


# Of the codes 0 to 15, as published: means between quantiles of a normal distribution, over the largest of them.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class NormalFloatCodec(BlockCodec):
    """`nf4`: codes are places in a table of 16 values; the scale is the largest magnitude of a block.

    Of two values at the same distance the smaller is chosen. Scales are bfloat16, which takes 4.25 bits a value with a
    block of 64; float32 scales would take 4.5, and the paper's scales in 8 bits 4.13.
    """

    bits: int = 4

    @property
    def levels(self) -> int:
        return 1

    def scales(self, blocks: jax.Array) -> jax.Array:
        return jnp.abs(super().scales(blocks))

    def codes(self, scaled: jax.Array) -> jax.Array:
        middles = [(low + high) / 2 for low, high in pairwise(NF4)]
        return sum(((scaled > middle).astype(jnp.uint8) for middle in middles), jnp.zeros(scaled.shape, jnp.uint8))

    def values(self, codes: jax.Array) -> jax.Array:
        """Return the values by the bits of codes: a few choices for each value instead of a read of the table."""
        found: list = [jnp.float32(value) for value in NF4]
        for bit in range(self.bits):
            odd = (codes >> bit) & 1 == 1
            found = [jnp.where(odd, high, low) for low, high in zip(found[::2], found[1::2], strict=True)]
        return found[0]
