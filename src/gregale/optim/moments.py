"""The state of an optimizer in bfloat16 or in 8 bits, with stochastic rounding."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from haliax import NamedArray
from jax.typing import ArrayLike

from gregale.axes.layout import EMBED, Layout, is_named
from gregale.axes.parameters import IN_BLOCK
from gregale.errors import KeyedError

FLOAT32, BFLOAT16, INT8 = "float32", "bfloat16", "int8"
MOMENTS = (FLOAT32, BFLOAT16, INT8)
BLOCK = 16  # values along `embed` with one scale
LARGEST, UNIT = 127, 128  # the largest code, and that of the scale itself


class Int8Moment(NamedTuple):
    """A moment in codes of 8 bits: `scale * (code / 128)^2` with the sign of the code, for blocks along `embed`.

    In both arrays `embed` counts blocks, so that each mapping splits the moment by whole blocks. The square gives small
    values small steps: a block has values over four decades, for the roots in Adam's denominator over two. The product
    of a scale's 8 bits and a square's 14 is exact in float32, however a compiler orders it.
    """

    codes: NamedArray  # int8 [..., embed, in_block, ...]
    scales: NamedArray  # bfloat16 [..., embed, ...]

    @classmethod
    def of(cls, moment: NamedArray, count: ArrayLike) -> "Int8Moment":
        """Return a moment in codes, rounded by chance so that its mean is exact.

        In a block without a negative value, such as one of second moments, what is above zero stays above zero: Adam
        divides by its root.
        """
        names, place = moment.axis_names, moment.axis_names.index(EMBED)
        shape = moment.array.shape
        values = moment.array.reshape(*shape[:place], -1, BLOCK, *shape[place + 1 :])
        sizes = jnp.abs(values)
        largest = jnp.max(sizes, axis=place + 1)
        scales = (largest * ((UNIT / LARGEST) ** 2 * (1 + 2**-8))).astype(jnp.bfloat16)  # the largest is at most 127
        scale = jnp.expand_dims(scales.astype(jnp.float32), place + 1)
        below = jnp.clip(jnp.floor(UNIT * jnp.sqrt(sizes / jnp.where(scale > 0, scale, 1))), 0, LARGEST - 1)
        lower, upper = (scale * jnp.square(each / UNIT) for each in (below, below + 1))
        share = (sizes - lower) / jnp.where(scale > 0, upper - lower, 1)
        code = below + (share * 2**16 > (chances(values, count) & 0xFFFF).astype(jnp.float32))
        is_positive = jnp.expand_dims(jnp.min(values, axis=place + 1) >= 0, place + 1) & (values > 0)
        code = jnp.sign(values) * jnp.where(is_positive, jnp.maximum(code, 1), code)
        behind = (*names[: place + 1], IN_BLOCK, *names[place + 1 :])
        return cls(NamedArray(code.astype(jnp.int8), behind), NamedArray(scales, names))

    def decoded(self) -> NamedArray:
        """Return the moment in float32."""
        place = self.scales.axis_names.index(EMBED)
        codes, scale = self.codes.array.astype(jnp.float32), self.scales.array.astype(jnp.float32)
        values = jnp.expand_dims(scale, place + 1) * codes * jnp.abs(codes) / UNIT**2
        shape = self.scales.array.shape
        whole = (*shape[:place], shape[place] * BLOCK, *shape[place + 1 :])
        return NamedArray(values.reshape(whole), self.scales.axis_names)


def is_int8(node: Any) -> bool:
    return isinstance(node, Int8Moment)


class RoundedState(NamedTuple):
    count: ArrayLike  # updates so far
    inner: Any  # the transformation's own state; arrays of more than one float32 as bfloat16 or in 8 bits


def kept_in(dtype: str, transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return a transformation whose state is kept in `dtype` between updates, one of `MOMENTS`.

    An update computes in float32, from the state as it is kept. Then the new state is rounded up or down by chance, so
    that its mean is exact: a moment that changes by less than half of its last bit would never change if it were
    rounded to the nearest. The chance follows from the value and the number of the update. So it is the same on every
    mesh and after a resume. With int8, arrays without an axis `embed` stay float32: they are small.
    """
    if dtype == FLOAT32:
        return transformation

    def init(params):
        count = jnp.zeros((), jnp.int32)
        return RoundedState(count, _kept(transformation.init(params), count, dtype))

    def update(updates, state, params=None):
        updates, inner = transformation.update(updates, decoded(state.inner), params)
        count = optax.safe_increment(state.count)
        return updates, RoundedState(count, _kept(inner, count, dtype))

    return optax.GradientTransformation(init, update)


def decoded(state: Any) -> Any:
    """Return a state with float32 in place of what is kept in fewer bits."""

    def one(node: Any) -> Any:
        if is_int8(node):
            return node.decoded()
        return node.astype(jnp.float32) if node.dtype == jnp.bfloat16 else node

    return jax.tree.map(one, state, is_leaf=lambda node: is_int8(node) or is_named(node))


def _kept(state: Any, count: ArrayLike, dtype: str) -> Any:
    def one(leaf: Any) -> Any:
        array = leaf.array if is_named(leaf) else leaf
        if array.ndim == 0 or array.dtype != jnp.float32:
            return leaf
        if dtype == BFLOAT16:
            return jax.tree.map(lambda own: stochastically_rounded(own, count), leaf)
        return Int8Moment.of(leaf, count) if is_named(leaf) and EMBED in leaf.axis_names else leaf

    return jax.tree.map(one, state, is_leaf=is_named)


def check_moments(dtype: str, parameters: Any, layout: Layout | None) -> None:
    """Raise `KeyedError` if a device would hold a part of a block of a moment in 8 bits."""
    leaves = [leaf for leaf in jax.tree.leaves(parameters, is_leaf=is_named) if is_named(leaf)]
    sizes = {leaf.resolve_axis(EMBED).size for leaf in leaves if EMBED in leaf.axis_names}
    devices = 1 if layout is None else layout.devices((EMBED,), layout.opt_state)
    for size in sizes if dtype == INT8 else ():
        if size % (BLOCK * devices):
            reason = f": blocks have {BLOCK} values of `embed`, and {size} / ({BLOCK} x {devices} devices) = "
            reason += f"{size / BLOCK / devices:.4g} is not a whole number. Use bfloat16, or another mesh.data."
            raise KeyedError("moments", f"is {INT8}", reason)


def chances(values: jax.Array, count: ArrayLike) -> jax.Array:
    """Return 32 bits for each float32 value, uint32: those of another value, or of another count, are others."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    chance = (bits ^ (jnp.asarray(count).astype(jnp.uint32) * jnp.uint32(0x9E3779B9))) * jnp.uint32(0x85EBCA6B)
    chance = (chance ^ (chance >> 13)) * jnp.uint32(0xC2B2AE35)  # the finaliser of MurmurHash3
    return chance ^ (chance >> 16)


def stochastically_rounded(values: jax.Array, count: ArrayLike) -> jax.Array:
    """Return float32 values as bfloat16: up with the probability of their lower 16 bits / 2^16, else towards zero.

    What is not finite stays so.

    - `count`: an integer []; another one draws other chances
    """
    upper = (jax.lax.bitcast_convert_type(values, jnp.uint32) + (chances(values, count) & 0xFFFF)) >> 16
    rounded = jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(values), rounded, values.astype(jnp.bfloat16))
