"""The interface of every codec: float values to one uint8 message and back."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from gregale.codecs.formats import FLOAT_BITS, WireFormat


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
