"""A random rotation of blocks in front of a block quantiser, for values with heavy tails."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from gregale.codecs.blocks import BlockCodec
from gregale.codecs.codec import Codec
from gregale.codecs.formats import WireFormat


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
