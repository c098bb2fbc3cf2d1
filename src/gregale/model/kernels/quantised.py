"""Linear products of 8-bit numbers, forward and backward.

For y = x w with rows t, inputs i and outputs o, and the gradient g by y:

    x[t, i] = sx[t] X[t, i],  w[i, o] = W[i, o] sw[o]    y[t, o]  = sx[t] sw[o] sum_i X[t, i] W[i, o]
    g[t, o] sw[o] = sa[t] A[t, o]                        dx[t, i] = sa[t] sum_o A[t, o] W[i, o]
    x[t, i] = C[t, i] sc[i],  g[t, o] = B[t, o] sb[o]    dw[i, o] = sc[i] sb[o] sum_t C[t, i] B[t, o]

Capitals have 8 bits. A scale is float32: the largest absolute value along the contracted axis over the largest number
of the format. For dx the gradient takes the scales of w over before it is quantised.

Devices that share an axis cut it into their parts. Each part has its own scales, so that only sums of parts in the
compute dtype cross devices, as for unquantised products. If devices have shards of a weight, the numbers of the shards
are gathered (`in_eight_bits`), with scales of the whole weight.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from math import prod
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from gregale.axes.layout import AxisMapping, Layout

SMALLEST = 1e-30  # of a row's largest value, which is a divisor
PART, SUMMED = "_part", "_summed"  # the ending of axes of parts, and the name of joined axes


@dataclass(frozen=True)
class Format:
    """The 8-bit numbers of products: their dtype and their largest number, and the dtype of sums."""

    dtype: jnp.dtype
    largest: float
    gradient: jnp.dtype
    largest_gradient: float
    sums: jnp.dtype


Pair = tuple[NamedArray, NamedArray | None]
"""Numbers and their scales; None: the other operand has taken them over."""

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
        """Return the sum over axes of parts, in `dtype` as it is sent."""
        places = [place for place, name in enumerate(x.axis_names) if name in names]
        kept = tuple(name for place, name in enumerate(x.axis_names) if place not in places)
        array = x.array.astype(dtype)
        return NamedArray(jax.lax.reduce_sum(array, places) if places else array, kept)

    def sums(self, left: NamedArray, right: NamedArray, names: Sequence[str]) -> NamedArray:
        """Return the float32 sums of products over axes: [*shared by both, *left, *right].

        The axes are joined, because with several the compiler would copy the operands, or turn them back.
        """
        left, right, names = _joined(left, names), _joined(right, names), [SUMMED]
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

    def product(self, left: Pair, right: Pair, names: Sequence[str], dtype: jnp.dtype) -> NamedArray:
        """Return the sums of products over axes, and over their parts, times the scales."""
        scales = [scale for _, scale in (left, right) if scale is not None]
        found = reduce(operator.mul, scales, self.sums(left[0], right[0], names))
        return self.added(found, [_part(name) for name in names], dtype)

    def numbers(self, x: NamedArray, along: Sequence[str], turned: bool = False) -> tuple[NamedArray, NamedArray]:
        """Return 8-bit numbers of `x`, and their scales, which are the same along the named axes; it joins these.

        With `turned` they are last in the numbers. The matrix units of a TPU take a left operand of 8 bits at full
        speed only with the contracted axis last in memory.
        """
        if self._has_kernel(x, along):
            return self._by_kernel(x, None, along, turned)
        numbers, scale = _quantised(x.astype(jnp.float32), along, self.format.dtype, self.format.largest)
        return _joined(numbers.rearrange((..., *along)) if turned else numbers, along), scale

    def weight_numbers(self, weight: NamedArray, inputs: Sequence[str]) -> tuple[NamedArray, NamedArray]:
        """Return 8-bit numbers of a weight, with its axes, and their scales, which are the same along the inputs."""
        numbers, scale = self.numbers(weight, inputs)
        return numbers.unflatten_axis(SUMMED, [weight.resolve_axis(name) for name in inputs]), scale

    def gradient_numbers(self, x: NamedArray, along: Sequence[str], factor: NamedArray | None = None):
        """Return 8-bit numbers of a gradient times a factor, and their scales: see `numbers`."""
        if self._has_kernel(x, along):
            return self._by_kernel(x, factor, along)
        exact = x.astype(jnp.float32)
        if factor is not None:
            exact = exact.broadcast_axis([axis for axis in factor.axes if axis.name not in x.axis_names]) * factor
        numbers, scale = _quantised(exact, along, self.format.gradient, self.format.largest_gradient)
        return _joined(numbers, along), scale

    def _has_kernel(self, x: NamedArray, along: Sequence[str]) -> bool:
        if self.platform != "tpu":
            return False
        from gregale.model.kernels.tpu.eight_bits import fits  # Pallas takes long to import

        return fits(size_of(x, along), size_of(x, within(x, without=along)))

    def _by_kernel(self, x: NamedArray, factor: NamedArray | None, along: Sequence[str], turned: bool = False):
        """Run the kernel on each device, which has one part of each shared axis."""
        from gregale.model.kernels.tpu.eight_bits import by_columns, by_rows, heads_first

        rest, last = within(x, without=along), within(x)[-1] in along
        rows, columns = (rest, list(along)) if last else (list(along), rest)
        x = x.rearrange((..., *rows, *columns))
        given = [x] if factor is None else [x, factor]
        parts = list(dict.fromkeys(name for each in given for name in each.axis_names if name.endswith(PART)))
        order = [*rest, SUMMED] if last or turned else [SUMMED, *rest]
        lengths = {axis.name: axis.size for axis in x.axes} | {SUMMED: size_of(x, along)}
        shapes = [[1] * len(parts) + [lengths[name] for name in names] for names in (order, rest)]
        sizes = [[lengths[name] for name in names] for names in (rows, columns)]

        def run(x: jax.Array, *factors: jax.Array) -> tuple[jax.Array, jax.Array]:
            matrix, flat = heads_first(x, *sizes), [each.reshape(-1) for each in factors]
            numbers, scale = by_rows(matrix, *flat) if last else by_columns(matrix, turned)
            return numbers.reshape(shapes[0]), scale.reshape(shapes[1])

        return self.on_devices(run, given, [(*parts, *names) for names in (order, rest)])

    def on_devices(self, run: Callable, given: Sequence[NamedArray], names: Sequence[Sequence[str]]) -> Any:
        """Run a function on each device's arrays; return named arrays, whose axes are given."""
        if self.layout is not None:
            mapping = {_part(name): self.layout.compute[name] for name, _ in self.parts}
            specs = [self.layout.spec(each, mapping) for each in (*(one.axis_names for one in given), *names)]
            run = self.layout.shard_map(run, tuple(specs[: len(given)]), tuple(specs[len(given) :]))
        found = run(*(each.array for each in given))
        return tuple(NamedArray(array, tuple(axes)) for array, axes in zip(found, names, strict=True))


class EightBits(eqx.Module):
    """A weight whose 8-bit numbers are gathered.

    - `exact`: in the compute dtype. Products use its gradient alone, so that no program gathers it
    - `numbers`, `scale`: see `Quantised.numbers`; shared axes are cut
    """

    exact: NamedArray
    numbers: NamedArray
    scale: NamedArray

    @property
    def axis_names(self) -> tuple[str, ...]:
        return self.exact.axis_names


Weight = NamedArray | EightBits
Ready = tuple[NamedArray, NamedArray] | None
"""Gathered numbers of a weight, and their scales; None: they are computed from the weight."""


def in_eight_bits(how: Quantised, exact: NamedArray, shard: NamedArray, inputs: Sequence[str]) -> Weight:
    """Return a gathered weight, whose numbers are gathered if devices have shards of it.

    - `exact`, `shard`: the weight in the compute dtype, gathered and not
    """
    layout = how.layout
    if layout is None or not layout.gathers(shard.axes):
        return exact
    mapping = {name: axes for name, axes in layout.params.items() if name not in layout.compute}
    return eight_bits(how, exact, shard, inputs, mapping)


def eight_bits(
    how: Quantised, exact: NamedArray, shard: NamedArray, inputs: Sequence[str], mapping: AxisMapping
) -> EightBits:
    """Return a weight and its numbers, of which a device computes those of its shard by `mapping`."""
    layout = how.layout
    assert layout is not None
    values = how.cut(jax.lax.stop_gradient(shard), shard.axis_names).astype(jnp.float32)
    parts = {_part(name): layout.compute[name] for name, _ in how.parts}
    found = _quantised(values, inputs, how.format.dtype, how.format.largest)
    found = layout.constrain(found, {**mapping, **parts})
    return EightBits(exact, *layout.constrain(found, parts))


def ready_and_cut(how: Quantised, weight: Weight, names: Sequence[str]) -> tuple[NamedArray, Ready]:
    """Return a weight with its shared axes cut, and its numbers if they are gathered: [*parts, *names]."""
    if isinstance(weight, EightBits):
        exact, _ = ready_and_cut(how, weight.exact, names)
        return exact, (weight.numbers.rearrange((..., *names)), weight.scale)
    return how.cut(weight, names).rearrange((..., *names)), None


def quantised_product(how: Quantised, x: NamedArray, weight: Weight) -> NamedArray:
    """Return x . weight over the axes that both have, in the dtype of `x`: [*rows, *outputs]."""
    inputs = [name for name in weight.axis_names if name in x.axis_names]
    rows = [name for name in x.axis_names if name not in inputs]
    outputs = [name for name in weight.axis_names if name not in inputs]
    x = how.cut(x, [*rows, *inputs]).rearrange((..., *rows, *inputs))
    product: Any = _product(how, x, *ready_and_cut(how, weight, [*inputs, *outputs]))
    return how.joined(product, [*rows, *outputs]).rearrange((*rows, *outputs))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: Quantised, x: NamedArray, weight: NamedArray, ready: Ready) -> NamedArray:
    """Return the product of [*parts, *rows, *inputs] and [*parts, *inputs, *outputs]."""
    return _forward(how, x, weight, ready)[0]


def _forward(how: Quantised, x: NamedArray, weight: NamedArray, ready: Ready):
    inputs = [name for name in within(x) if name in weight.axis_names]
    weights = ready or how.weight_numbers(weight, inputs)
    return how.product(how.numbers(x, inputs), weights, inputs, x.dtype), (x, weights)


def _backward(how: Quantised, saved, gradient: NamedArray):
    x, (weights, by_output) = saved
    rows, outputs = ([name for name in within(gradient) if name in each.axis_names] for each in (x, weights))
    taken = how.gradient_numbers(gradient, outputs, by_output)
    by_x = how.product(taken, (weights, None), outputs, gradient.dtype)
    taken = how.gradient_numbers(gradient, rows)
    by_weight = how.product(how.numbers(x, rows, turned=True), taken, rows, gradient.dtype)
    return by_x.rearrange(x.axis_names), by_weight.rearrange(weights.axis_names), None


_product.defvjp(_forward, _backward)


def _quantised(x: NamedArray, along: Sequence[str], dtype: jnp.dtype, largest: float) -> tuple[NamedArray, NamedArray]:
    most: Any = hax.maximum(hax.max(hax.abs(x), axis=tuple(along)), SMALLEST)
    scaled = x * (largest / most)
    return (hax.round(scaled) if jnp.issubdtype(dtype, jnp.integer) else scaled).astype(dtype), most / largest


def _joined(x: NamedArray, names: Sequence[str]) -> NamedArray:
    return x if SUMMED in x.axis_names else x.flatten_axes(tuple(names), SUMMED)


def within(x: NamedArray, without: Sequence[str] = ()) -> list[str]:
    """Return the axes that are not of parts, and not among some others."""
    return [name for name in x.axis_names if not name.endswith(PART) and name not in without]


def size_of(x: NamedArray, names: Sequence[str]) -> int:
    return prod(x.resolve_axis(name).size for name in names)


def _places(x: NamedArray, names: Sequence[str]) -> list[int]:
    return [x.axis_names.index(name) for name in names]


def _part(name: str) -> str:
    return name + PART
