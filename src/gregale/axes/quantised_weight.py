"""A weight that devices hold in few bits, and that is gathered in them."""

from typing import Any, Protocol, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from gregale.axes.layout import Layout

IN_BLOCK = "in_block"


class Blocks(Protocol):
    """A block codec (`gregale.codecs.blocks.BlockCodec`)."""

    @property
    def block(self) -> int: ...

    def quantise(self, blocks: jax.Array) -> tuple[jax.Array, jax.Array]: ...

    def pack(self, codes: jax.Array) -> jax.Array: ...

    def unpack(self, packed: jax.Array, axis: int) -> jax.Array: ...

    def values(self, codes: jax.Array) -> jax.Array: ...


class QuantisedWeight(eqx.Module):
    """A weight in codes, with a scale for each block of values along one of its axes, `along`.

    In both arrays `along` counts blocks, and the codes of a block are on the axis behind it. So each mapping splits the
    weight by whole blocks.

    - `dtype`: of the weight that was quantised
    """

    codes: NamedArray  # uint8 [..., along, in_block, ...]
    scales: NamedArray  # bfloat16 [..., along, ...]
    codec: Blocks = eqx.field(static=True)
    along: str = eqx.field(static=True)
    dtype: jnp.dtype = eqx.field(static=True)

    @classmethod
    def of(cls, weight: NamedArray, codec: Blocks, along: str) -> Self:
        """Return the quantised form of a weight, computed for one index of its first axis at a time."""
        place = weight.axis_names.index(along)

        def one(array: jax.Array) -> tuple[jax.Array, jax.Array]:
            last = jnp.moveaxis(array.astype(jnp.float32), place - 1, -1)
            codes, scales = codec.quantise(last.reshape(*last.shape[:-1], -1, codec.block))
            packed = jnp.moveaxis(codec.pack(codes), (-2, -1), (place - 1, place))
            return packed, jnp.moveaxis(scales, -1, place - 1).astype(jnp.bfloat16)

        codes, scales = jax.lax.map(one, weight.array)
        names = weight.axis_names
        behind = (*names[: place + 1], IN_BLOCK, *names[place + 1 :])
        return cls(NamedArray(codes, behind), NamedArray(scales, names), codec, along, jnp.dtype(weight.dtype))

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Return the axes of the weight."""
        counted = self.scales.resolve_axis(self.along)
        whole = Axis(self.along, counted.size * self.codec.block)
        return tuple(whole if axis == counted else axis for axis in self.scales.axes)

    @property
    def size(self) -> int:
        """Return the number of values."""
        return self.scales.size * self.codec.block

    def requantised(self, weight: NamedArray) -> Self:
        """Return another weight in the same form."""
        return self.of(weight.astype(self.dtype), self.codec, self.along)

    def decoded(self, dtype: jnp.dtype) -> NamedArray:
        """Return the weight: the product of value and scale in float32, rounded to `dtype`."""
        place = self.scales.axis_names.index(self.along)
        values = self.codec.values(self.codec.unpack(self.codes.array, place + 1))
        scaled = values * jnp.expand_dims(self.scales.array.astype(jnp.float32), place + 1)
        shape = tuple(axis.size for axis in self.axes)
        return NamedArray(scaled.astype(dtype).reshape(shape), self.scales.axis_names)

    def gathered(self, layout: Layout) -> Self:
        """Return the weight under `compute`; codes and scales are gathered."""
        held = layout.constrain((self.codes, self.scales), layout.params)
        codes, scales = layout.constrain(held, layout.compute)
        return type(self)(codes, scales, self.codec, self.along, self.dtype)


def is_quantised(node: Any) -> bool:
    return isinstance(node, QuantisedWeight)


def decoded(tree: Any, dtype: jnp.dtype) -> Any:
    """Return a tree with arrays in place of its quantised weights."""
    return jax.tree.map(lambda leaf: leaf.decoded(dtype) if is_quantised(leaf) else leaf, tree, is_leaf=is_quantised)
