"""Block quantisers: small codes and one bfloat16 scale per block, packed into bytes; and a rotation of their blocks."""

from abc import abstractmethod
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from gregale.codecs.codec import Codec
from gregale.codecs.formats import DEFAULT_BLOCK, SCALE_BITS, WireFormat

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
