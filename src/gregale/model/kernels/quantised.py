"""Linear products of 8-bit numbers, forward and backward.

For y = x w with rows t, inputs i and outputs o, and the gradient g by y:

    x[t, i] = sx[t] X[t, i],  w[i, o] = W[i, o] sw[o]    y[t, o]  = sx[t] sw[o] sum_i X[t, i] W[i, o]
    g[t, o] sw[o] = sa[t] A[t, o]                        dx[t, i] = sa[t] sum_o A[t, o] W[i, o]
    sx[t] g[t, o] = B[t, o] sb[o]                        dw[i, o] = sb[o] sum_t X[t, i] B[t, o]

Capitals have 8 bits. A scale is float32: the largest absolute value of a row or a column over the largest number of the
format. Values and weights are quantised once; the gradient takes their scales over before it is quantised.

Devices that share a contracted axis cut it into their parts. Each part has its own scales, so that only sums of parts
in the compute dtype cross devices, as for unquantised products.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.experimental.layout import Layout as MemoryOrder
from jax.experimental.layout import with_layout_constraint

from gregale.axes.layout import Layout

SMALLEST = 1e-30  # of a row's largest value, which is a divisor
ROWS, PART = "rows", "_part"  # names of axes, and their ending


@dataclass(frozen=True)
class Format:
    """The 8-bit numbers of products: their dtype and their largest number, and the dtype of sums."""

    dtype: jnp.dtype
    largest: float
    gradient: jnp.dtype
    largest_gradient: float
    sums: jnp.dtype


INT8 = Format(jnp.dtype(jnp.int8), 127.0, jnp.dtype(jnp.int8), 127.0, jnp.dtype(jnp.int32))
FP8 = Format(jnp.dtype(jnp.float8_e4m3fn), 448.0, jnp.dtype(jnp.float8_e5m2), 57344.0, jnp.dtype(jnp.float32))
FORMATS = {"int8": INT8, "fp8": FP8}


@dataclass(frozen=True)
class Quantised:
    """The execution of quantised products.

    - `format`: see `Format`
    - `platform`: of the devices. On `cpu` sums are float32, because XLA:CPU has no fast products of integers: they are
      exact up to 2^24, and rounded above
    - `parts`: axis name -> devices that share the axis, for axes that several share
    - `layout`: has the partition of these axes; None: one device
    """

    format: Format
    platform: str
    parts: tuple[tuple[str, int], ...] = ()
    layout: Layout | None = None

    def cut(self, x: NamedArray, names: Sequence[str]) -> NamedArray:
        """Cut shared axes into an axis of parts and an axis within a part, which keeps the name."""
        for name, parts in self.parts:
            if name in names:
                size = x.resolve_axis(name).size // parts
                x = x.unflatten_axis(name, (Axis(_part(name), parts), Axis(name, size)))
        return x

    def joined(self, x: NamedArray, names: Sequence[str]) -> NamedArray:
        """Invert `cut`."""
        for name, _ in self.parts:
            if name in names:
                x = x.flatten_axes((_part(name), name), name)
        return x

    def added(self, x: NamedArray, names: Sequence[str], dtype: jnp.dtype) -> NamedArray:
        """Return the sum over the parts of shared axes, in `dtype` as it is sent."""
        places = [place for place, name in enumerate(x.axis_names) if name in [_part(each) for each in names]]
        kept = tuple(name for place, name in enumerate(x.axis_names) if place not in places)
        array = x.array.astype(dtype)
        return NamedArray(jax.lax.reduce_sum(array, places) if places else array, kept)

    def sums(self, left: NamedArray, right: NamedArray, names: Sequence[str]) -> NamedArray:
        """Return the float32 sums of products over axes: [*shared by both, *left, *right]."""
        both = [name for name in left.axis_names if name in right.axis_names and name not in names]
        contracted, shared = ((_places(left, some), _places(right, some)) for some in (names, both))
        free = [name for x in (left, right) for name in x.axis_names if name not in (*both, *names)]
        if self.platform == "cpu":
            found = jax.lax.dot_general(
                left.array.astype(jnp.float32), right.array.astype(jnp.float32), (contracted, shared)
            )
        else:
            found = jax.lax.dot_general(
                left.array, right.array, (contracted, shared), preferred_element_type=self.format.sums
            )
        return NamedArray(found.astype(jnp.float32), (*both, *free))

    def turned(self, x: NamedArray) -> NamedArray:
        """Return [..., *inputs, rows] of [..., rows, *inputs], in this order in memory.

        The matrix units of a TPU take a left operand of 8 bits at full speed only with the contracted axis last.
        Without the constraint the compiler undoes the transposition.
        """
        return self.in_order(x.rearrange((..., ROWS)))

    def in_order(self, x: NamedArray) -> NamedArray:
        """Return `x` with its axes in this order in memory, on a TPU.

        Each device does it, because the partitioner gathers an array that has a constraint.
        """
        if self.platform != "tpu":
            return x
        order = MemoryOrder(tuple(range(x.ndim)))

        def constrain(array: jax.Array) -> jax.Array:
            return with_layout_constraint(array, order)

        if self.layout is not None:
            parts = {_part(name): self.layout.compute[name] for name, _ in self.parts}
            spec = self.layout.spec(x.axis_names, parts)
            return NamedArray(self.layout.shard_map(constrain, (spec,), spec)(x.array), x.axis_names)
        return NamedArray(constrain(x.array), x.axis_names)


def quantised_product(how: Quantised, x: NamedArray, weight: NamedArray) -> NamedArray:
    """Return x . weight over the axes that both have, in the dtype of `x`: [*rows, *outputs]."""
    inputs = [name for name in weight.axis_names if name in x.axis_names]
    rows = [name for name in x.axis_names if name not in inputs]
    x = how.cut(x.rearrange((*rows, *inputs)), rows)
    within = [x.resolve_axis(name) for name in rows]
    order = [name for name in x.axis_names if name not in inputs]
    # Rows are joined in the dtype of `x`: the compiler writes a float32 array where a shape changes after conversion.
    product: Any = _product(how, _flat(x, rows, inputs), weight.rearrange((*inputs, ...)))
    return how.joined(product.unflatten_axis(ROWS, within).rearrange((*order, ...)), rows).rearrange((*rows, ...))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: Quantised, x: NamedArray, weight: NamedArray) -> NamedArray:
    """Return the product of [*parts, rows, *inputs] and [*inputs, *outputs]."""
    return _forward(how, x, weight)[0]


def _forward(how: Quantised, x: NamedArray, weight: NamedArray):
    inputs = [name for name in weight.axis_names if name in x.axis_names]
    number = partial(_quantised, names=inputs, dtype=how.format.dtype, largest=how.format.largest)
    values, by_row = number(how.cut(x, inputs).astype(jnp.float32))
    weights, by_output = number(how.cut(weight, inputs).astype(jnp.float32))
    # Or the compiler turns float32 values before they are quantised, and the product that they come from with them.
    values = how.in_order(_held(values))
    product = how.added(how.sums(values, weights, inputs) * by_row * by_output, inputs, x.dtype)
    return product, (values, by_row, weights, by_output)


def _backward(how: Quantised, saved, gradient: NamedArray):
    values, by_row, weights, by_output = saved
    inputs = [name for name in weights.axis_names if name in values.axis_names and name not in by_output.axis_names]
    outputs = [name for name in gradient.axis_names if name in by_output.axis_names]
    rows = [name for name in gradient.axis_names if name not in outputs]
    shared = [name.removesuffix(PART) for name in rows if name.endswith(PART)]
    of_inputs = [axis for axis in by_row.axes if axis.name not in rows]  # parts
    exact = _held(gradient).astype(jnp.float32).broadcast_axis(of_inputs)
    quantised = partial(_quantised, dtype=how.format.gradient, largest=how.format.largest_gradient)

    taken, scale = quantised(how.cut(exact * by_output, outputs), outputs)
    by_x = how.added(how.sums(taken, how.cut(weights, outputs), outputs) * scale, outputs, gradient.dtype)

    taken, scale = quantised(exact * by_row, [ROWS])
    by_weight = how.added(how.sums(how.turned(values), taken, [ROWS]) * scale, shared, gradient.dtype)
    by_x, by_weight = how.joined(by_x, inputs), how.joined(by_weight, inputs)
    return by_x.rearrange((*rows, *inputs)), by_weight.rearrange((*inputs, *outputs))


_product.defvjp(_forward, _backward)


def _quantised(x: NamedArray, names: Sequence[str], dtype: jnp.dtype, largest: float) -> tuple[NamedArray, NamedArray]:
    """Return 8-bit numbers and their scales, which are the same along the named axes."""
    most: Any = hax.maximum(hax.max(hax.abs(x), axis=tuple(names)), SMALLEST)
    scaled = x * (largest / most)
    return (hax.round(scaled) if jnp.issubdtype(dtype, jnp.integer) else scaled).astype(dtype), most / largest


def _flat(x: NamedArray, rows: Sequence[str], inputs: Sequence[str]) -> NamedArray:
    """Return [*parts, rows, *inputs] with the axes of rows joined."""
    return x.rearrange((..., *rows, *inputs)).flatten_axes(tuple(rows), ROWS)


def _held(x: NamedArray) -> NamedArray:
    """Return `x` so that the compiler writes it in its own dtype and moves no operation across it."""
    return NamedArray(jax.lax.optimization_barrier(x.array), x.axis_names)


def _places(x: NamedArray, names: Sequence[str]) -> list[int]:
    return [x.axis_names.index(name) for name in names]


def _part(name: str) -> str:
    return name + PART
