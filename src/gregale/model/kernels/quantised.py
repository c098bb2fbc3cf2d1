"""Linear products of 8-bit numbers, forward and backward: alone, and in a gated MLP.

For y = x w with rows t, inputs i and outputs o, and the gradient g by y:

    x[t, i] = sx[t] X[t, i],  w[i, o] = W[i, o] sw[o]    y[t, o]  = sx[t] sw[o] sum_i X[t, i] W[i, o]
    g[t, o] sw[o] = sa[t] A[t, o]                        dx[t, i] = sa[t] sum_o A[t, o] W[i, o]
    x[t, i] = C[t, i] sc[i],  g[t, o] = B[t, o] sb[o]    dw[i, o] = sc[i] sb[o] sum_t C[t, i] B[t, o]

Capitals have 8 bits. A scale is float32: the largest absolute value along the contracted axis over the largest number
of the format. For dx the gradient takes the scales of w over before it is quantised.

Devices that share an axis cut it into their parts. Each part has its own scales, so that only sums of parts in the
compute dtype cross devices, as for unquantised products. If devices have shards of a weight, the numbers of the shards
are gathered (`in_eight_bits`), with scales of the whole weight.

Its kernels quantise the activation and its gradients as they compute them. So these are not in memory in the compute
dtype, and x is quantised once for the products with gate and up. The products are those of `quantised_product`.
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
from jax.ad_checkpoint import checkpoint_name

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
        from gregale.model.kernels.tpu.products import fits  # Pallas takes long to import

        return fits(size_of(x, along), size_of(x, within(x, without=along)))

    def _by_kernel(self, x: NamedArray, factor: NamedArray | None, along: Sequence[str], turned: bool = False):
        """Run the kernel on each device, which has one part of each shared axis."""
        from gregale.model.kernels.tpu.products import by_columns, by_rows, heads_first

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
    return int8_quantise(how, exact, shard, inputs, mapping)


def int8_quantise(
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


def quantised_mlp(how: Quantised, x: NamedArray, weights: Sequence[Weight]) -> NamedArray | None:
    """Return down(silu(gate(x)) * up(x)) in the dtype and with the axes of `x`; None: the kernels do not take it.

    - `weights`: gate and up [inputs, hidden], and down [hidden, inputs]
    """
    inputs, _ = weights[0].axis_names
    rows = [name for name in x.axis_names if name != inputs]
    cut_weights = tuple(ready_and_cut(how, each, each.axis_names) for each in weights)
    cut = how.cut(x, rows).rearrange((..., *rows, inputs))
    if inputs in dict(how.parts) or not _fits(how, cut, cut_weights[0][0]):
        return None
    found: Any = _mlp(how, cut, *zip(*cut_weights, strict=True))
    return how.joined(found, rows).rearrange(x.axis_names)


def _fits(how: Quantised, x: NamedArray, weight: NamedArray) -> bool:
    if how.platform != "tpu":
        return False
    from gregale.model.kernels.tpu.products import gated_fits  # Pallas takes long to import

    *rows, inputs = within(x)
    return gated_fits(size_of(x, rows), size_of(weight, within(weight, without=[inputs])), x.dtype.itemsize)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(how: Quantised, x: NamedArray, weights: Sequence[NamedArray], ready: Sequence[Ready]) -> NamedArray:
    return _mlp_forward(how, x, weights, ready)[0]


def _mlp_forward(how: Quantised, x: NamedArray, weights: Sequence[NamedArray], ready: Sequence[Ready]):
    *_, inputs = within(x)
    *_, hidden = within(weights[0])
    given = zip(weights, ready, (inputs, inputs, hidden), strict=True)
    gate, up, down = (found or how.weight_numbers(weight, [name]) for weight, found, name in given)
    numbers = how.numbers(x, [inputs])
    first = [how.product(numbers, weight, [inputs], x.dtype) for weight in (gate, up)]
    named = [
        NamedArray(checkpoint_name(each.array, name), each.axis_names)
        for each, name in zip(first, ("gate", "up"), strict=True)
    ]
    return how.product(_gated(how, *named), down, [hidden], x.dtype), (x, *named, (gate, up, down))


def _mlp_backward(how: Quantised, saved, gradient: NamedArray):
    x, gate, up, (*first, down) = saved
    dtype, (*rows, inputs), (*_, hidden) = gradient.dtype, within(x), within(gate)
    taken = how.gradient_numbers(gradient, [inputs], down[1])
    by_gated = how.product(taken, (down[0], None), [inputs], dtype).rearrange(gate.axis_names)
    by_row, by_column, gated = _gradients(how, gate, up, by_gated, *(scale for _, scale in first))

    by_x = [
        how.product(each, (numbers, None), [hidden], dtype) for each, (numbers, _) in zip(by_row, first, strict=True)
    ]
    turned = how.numbers(x, rows, turned=True)
    by_weights = [how.product(turned, each, rows, dtype) for each in by_column]
    by_weights.append(how.product(gated, how.gradient_numbers(gradient, rows), rows, dtype))
    by_weights = (each.rearrange(like.axis_names) for each, (like, _) in zip(by_weights, (*first, down), strict=True))
    return (by_x[0] + by_x[1]).rearrange(x.axis_names), tuple(by_weights), None


_mlp.defvjp(_mlp_forward, _mlp_backward)


def _gated(how: Quantised, gate: NamedArray, up: NamedArray) -> Pair:
    """Return the integers of silu(gate) * up, and their scales, one for each row."""
    from gregale.model.kernels.tpu.products import gated_rows

    def run(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
        numbers, scale = gated_rows(*_matrices(gate, up))
        return numbers.reshape(gate.shape), scale.reshape(gate.shape[:-1])

    return how.on_devices(run, [gate, up], [gate.axis_names, gate.axis_names[:-1]])


def _gradients(how: Quantised, gate: NamedArray, up: NamedArray, by_gated: NamedArray, *factors: NamedArray):
    """Return the gradients by gate and up times the scales of their weights, with scales of rows; these gradients
    themselves, with scales of columns; and silu(gate) * up turned, with scales of columns.
    """
    from gregale.model.kernels.tpu.products import gradient_columns, gradient_rows

    *outer, hidden = gate.axis_names
    parts, rows = [name for name in outer if name.endswith(PART)], within(gate, without=[hidden])
    whole, turned, columns = gate.axis_names, (*parts, hidden, *rows), (*parts, hidden)
    axes = [whole, whole, outer, outer, whole, whole, turned, columns, columns, columns]
    sizes = {axis.name: axis.size for axis in gate.axes} | dict.fromkeys(parts, 1)

    def run(gate: jax.Array, up: jax.Array, by_gated: jax.Array, *factors: jax.Array) -> tuple[jax.Array, ...]:
        matrices = _matrices(gate, up, by_gated)
        *by_row, most = gradient_rows(*matrices, *(each.reshape(-1) for each in factors))
        found = (*by_row, *gradient_columns(*matrices, most))
        return tuple(each.reshape([sizes[name] for name in names]) for each, names in zip(found, axes, strict=True))

    found = how.on_devices(run, [gate, up, by_gated, *factors], axes)
    by_row, (by_gate, by_up, gated), scales = found[:4], found[4:7], found[7:]
    by_column = (by_gate, scales[0]), (by_up, scales[1])
    return (by_row[::2], by_row[1::2]), by_column, (gated, scales[2])


def _matrices(*arrays: jax.Array) -> list[jax.Array]:
    return [each.reshape(-1, each.shape[-1]) for each in arrays]
