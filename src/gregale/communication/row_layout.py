"""The division of one device's shard into rows, each encoded and sent separately over a network.

It also has the programs that a member of a group runs for a row, on its processor.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gregale.codecs.codec import Codec
from gregale.codecs.config import ReduceConfig
from gregale.codecs.feedback import QuantisedArray, load, stored_block
from gregale.communication.collective_phases import EXACT, encoded, remember

ROW_VALUES = 1 << 16  # 256 kB of float32; a row is decoded in one call


class RowLayout(NamedTuple):
    """A shard's values as equal rows; the last one is padded with zeros.

    A row is a whole number of blocks of the codecs, so that no block holds values of two rows. One row has the shard's
    own number of values.
    """

    size: int  # values of the shard
    count: int  # rows
    row: int  # values of a row
    exact: bool = False  # whether they are sent as float32 with any codec, as scalars are

    def to_rows(self, values: jax.Array) -> jax.Array:
        """Turn [size] into [count, row]."""
        return jnp.pad(values, (0, self.count * self.row - self.size)).reshape(self.count, self.row)

    def from_rows(self, rows: jax.Array) -> jax.Array:
        """Turn [count, row] into [size]."""
        return rows.reshape(-1)[: self.size]

    def first_codec(self, config: ReduceConfig) -> Codec:
        return EXACT if self.exact else config.first_codec()

    def second_codec(self, config: ReduceConfig) -> Codec:
        return EXACT if self.exact else config.second_codec()


def rows_of(size: int, config: ReduceConfig, exact: bool = False, max_values: int = ROW_VALUES) -> RowLayout:
    """Return the equal rows of a shard of `size` values, at most about `max_values` each; whole blocks if several."""
    count = max(1, -(-size // max_values))
    if count == 1:
        return RowLayout(size, 1, size, exact)
    row = -(-size // (count * config.block)) * config.block
    return RowLayout(size, -(-size // row), row, exact)


class RowPrograms(NamedTuple):
    """The compiled programs of a member for a row, for the processor: one set for each length of rows."""

    size: int  # values of a row
    add: Callable[..., Any]  # (sum [size], message, weight) -> sum + weight * decode(message)
    encode: Callable[..., Any]  # (sum, total weight, error or None) -> message of the average, next error or None
    decode: Callable[..., Any]  # message -> the values that all members get, [size]
    keeps_error: bool


@lru_cache(maxsize=4096)
def row_programs(first: Codec, second: Codec, beta: float | None, size: int) -> RowPrograms:
    """Return the programs for rows of `size` values; `beta`: of the second phase's feedback, None without."""

    def add(total: jax.Array, message: jax.Array, weight: jax.Array) -> jax.Array:
        return total + weight * first.decode(message, size)

    def encode(total: jax.Array, weight: jax.Array, error: QuantisedArray | None):
        values, errors = {"row": total / weight}, {} if error is None else {"row": load(error)}
        message, compensated, kept = encoded(values, errors, second, beta or 0.0)
        if error is None:
            return message, None
        finite = jnp.all(jnp.isfinite(compensated["row"]))
        return message, remember({"row": error}, kept, finite)["row"]

    def decode(message: jax.Array) -> jax.Array:
        return second.decode(message, size)

    return RowPrograms(size, jax.jit(add), jax.jit(encode), jax.jit(decode), beta is not None)


def no_error(size: int) -> QuantisedArray:
    return QuantisedArray(np.zeros(size, np.uint8), np.zeros(size // stored_block(size), jnp.bfloat16))
