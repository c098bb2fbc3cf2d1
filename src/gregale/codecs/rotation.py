"""A random rotation of blocks in front of a block quantiser, for values with heavy tails."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from gregale.codecs.blocks import BlockCodec
from gregale.codecs.codec import Codec
from gregale.codecs.formats import WireFormat


def hadamard(size: int) -> np.ndarray:
    """The orthonormal, symmetric Hadamard matrix [size, size] (Sylvester's); `size` is a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron(matrix, [[1, 1], [1, -1]])
    return (matrix / np.sqrt(size)).astype(np.float32)


@dataclass(frozen=True)
class RotatedCodec(Codec):
    """Every block x goes through `codec` as H D x: signs D drawn once from `seed`, then a Hadamard transform H.

    One large value of a block is spread over all of it, so the block's scale shrinks; the error comes back rotated,
    of the same norm. Values above 3e38 / sqrt(block) may overflow, and then decode to NaN. (As in QuIP#, 2402.04396.)

    - `codec`: its block is a power of two
    """

    codec: BlockCodec
    seed: int = 0

    @property
    def format(self) -> WireFormat:
        return self.codec.format

    def encode(self, values: jax.Array) -> jax.Array:
        *rows, size = values.shape
        padded = jnp.pad(values.astype(jnp.float32), [(0, 0)] * len(rows) + [(0, -size % self.codec.block)])
        return self.codec.encode(self._turn(padded * self._signs(padded.shape[-1])))

    def decode(self, message: jax.Array, size: int) -> jax.Array:
        padded = self.codec.decode(message, size + -size % self.codec.block)
        return (self._turn(padded) * self._signs(padded.shape[-1]))[..., :size]

    def _signs(self, size: int) -> jax.Array:
        signs = np.random.default_rng(self.seed).choice(np.float32([-1, 1]), self.codec.block)
        return jnp.tile(signs, size // self.codec.block)

    def _turn(self, values: jax.Array) -> jax.Array:
        blocks = values.reshape(*values.shape[:-1], -1, self.codec.block)
        turned = jnp.matmul(blocks, hadamard(self.codec.block), precision=jax.lax.Precision.HIGHEST)
        return turned.reshape(values.shape)
