"""The storage of error feedback between steps, in 8 bits (LoCo, 2407.04480)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gregale.codecs.blocks import UniformCodec
from gregale.codecs.formats import DEFAULT_BLOCK


class QuantisedArray(NamedTuple):
    """An array of any shape in 8 bits: codes of the same shape, and scales for blocks along its last dimension.

    All-zero codes and scales represent zeros.
    """

    codes: Any  # uint8 [..., n]
    scales: Any  # bfloat16 [..., n / block]


def stored_block(size: int) -> int:
    """Return the block for a last dimension of `size`: its smallest divisor from 64 on, or all of it."""
    return next((block for block in range(DEFAULT_BLOCK, size) if size % block == 0), size)


def store(values: jax.Array) -> QuantisedArray:
    """Return float32 [..., n] in 8 bits: an error of at most (1 + 2^-8) / 256 of the largest magnitude of its block.

    A clipped value, almost as large and of the other sign, has an error of at most 3/256 of it.
    """
    codec = UniformCodec(bits=8, block=stored_block(values.shape[-1]))
    codes, scales = codec.quantise(values.reshape(*values.shape[:-1], -1, codec.block))
    return QuantisedArray(codes.reshape(values.shape), scales.astype(jnp.bfloat16))


def load(stored: QuantisedArray) -> jax.Array:
    """Return the stored values as float32."""
    codes, scales = stored
    codec = UniformCodec(bits=8, block=codes.shape[-1] // scales.shape[-1])
    blocks = codes.reshape(*scales.shape, codec.block)
    return codec.dequantise(blocks, scales).reshape(codes.shape)


def next_error(error: jax.Array, lost: jax.Array, beta: float) -> jax.Array:
    """Return `beta * error + (1 - beta) * lost`, where `lost` is the intended less the sent value."""
    return beta * error + (1 - beta) * lost
