"""How the values of one device's shard are cut into rows, each encoded and sent by itself over a network."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gregale.codecs.codec import Codec
from gregale.codecs.config import ReduceConfig
from gregale.communication.legs import EXACT

ROW_VALUES = 1 << 16  # 256 kB of float32; a row is decoded in one call


class Rows(NamedTuple):
    """A shard's values as equal rows; the last one is filled with zeros.

    A row is a whole number of blocks of the codecs, so that no block holds values of two rows. One row has the shard's
    own number of values.

    - `size`: values of the shard
    - `count`: rows
    - `row`: values of a row
    - `exact`: whether they go as float32 whatever the codecs, as scalars do
    """

    size: int
    count: int
    row: int
    exact: bool = False

    def cut(self, values: jax.Array) -> jax.Array:
        """[size] -> [count, row]"""
        return jnp.pad(values, (0, self.count * self.row - self.size)).reshape(self.count, self.row)

    def join(self, rows: jax.Array) -> jax.Array:
        """[count, row] -> [size]"""
        return rows.reshape(-1)[: self.size]

    def first_codec(self, config: ReduceConfig) -> Codec:
        """The codec of the first leg."""
        return EXACT if self.exact else config.first_codec()

    def second_codec(self, config: ReduceConfig) -> Codec:
        """The codec of the second leg."""
        return EXACT if self.exact else config.second_codec()


def rows_of(size: int, config: ReduceConfig, exact: bool = False, most: int = ROW_VALUES) -> Rows:
    """The rows of a shard of `size` values, of about `most` values at most: equal, and whole blocks if several."""
    count = max(1, -(-size // most))
    if count == 1:
        return Rows(size, 1, size, exact)
    row = -(-size // (count * config.block)) * config.block
    return Rows(size, -(-size // row), row, exact)
