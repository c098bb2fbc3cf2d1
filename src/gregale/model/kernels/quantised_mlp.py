"""down(silu(gate(x)) * up(x)) with products of 8-bit numbers on a TPU, as one operation with its own backward pass.

Its kernels quantise the activation and its gradients as they compute them. So these are not in memory in the compute
dtype, and x is quantised once for the products with gate and up. The products are those of `quantised_product`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from haliax import NamedArray
from jax.ad_checkpoint import checkpoint_name

from gregale.model.kernels.quantised import PART, Pair, Quantised, Ready, Weight, ready_and_cut, size_of, within


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
    from gregale.model.kernels.tpu.gated_bits import fits  # Pallas takes long to import

    *rows, inputs = within(x)
    return fits(size_of(x, rows), size_of(weight, within(weight, without=[inputs])), x.dtype.itemsize)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(how: Quantised, x: NamedArray, weights: Sequence[NamedArray], ready: Sequence[Ready]) -> NamedArray:
    return _forward(how, x, weights, ready)[0]


def _forward(how: Quantised, x: NamedArray, weights: Sequence[NamedArray], ready: Sequence[Ready]):
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


def _backward(how: Quantised, saved, gradient: NamedArray):
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


_mlp.defvjp(_forward, _backward)


def _gated(how: Quantised, gate: NamedArray, up: NamedArray) -> Pair:
    """Return the integers of silu(gate) * up, and their scales, one for each row."""
    from gregale.model.kernels.tpu.gated_bits import gated_rows

    def run(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
        numbers, scale = gated_rows(*_matrices(gate, up))
        return numbers.reshape(gate.shape), scale.reshape(gate.shape[:-1])

    return how.on_devices(run, [gate, up], [gate.axis_names, gate.axis_names[:-1]])


def _gradients(how: Quantised, gate: NamedArray, up: NamedArray, by_gated: NamedArray, *factors: NamedArray):
    """Return the gradients by gate and up times the scales of their weights, with scales of rows; these gradients
    themselves, with scales of columns; and silu(gate) * up turned, with scales of columns.
    """
    from gregale.model.kernels.tpu.gated_bits import gradient_columns, gradient_rows

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
