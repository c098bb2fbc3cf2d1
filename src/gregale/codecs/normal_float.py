"""The 4-bit normal float (NF4) of QLoRA (Dettmers et al. 2023, arXiv 2305.14314)."""

from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp

from gregale.codecs.blocks import BlockCodec

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
