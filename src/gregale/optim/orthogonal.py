"""Newton-Schulz iterations on whole matrices, distributed over the fast axes of a mesh."""

from collections.abc import Iterable
from math import prod

import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax.sharding import PartitionSpec
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from gregale.audit.traffic import FLOAT32, Transfer
from gregale.axes.layout import Layout
from gregale.optim.matrices import MatrixAxes

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Newton-Schulz (Jordan, 2024)


def orthogonalise(
    leaf: NamedArray | jax.Array, sides: MatrixAxes, layout: Layout | None, iterations: int, epsilon: float
) -> NamedArray | jax.Array:
    """Return every matrix of `leaf` with its singular values near 1 (Jordan, 2024), in the shape of `leaf`.

    With a `layout`, a named array enters and leaves as shards of `params`. The devices divide the matrices of a stack.
    An all-to-all over the mesh axes that split a matrix brings whole matrices to each device, which iterates alone.
    Another all-to-all returns the shards. Nothing crosses `replica`. Without this, the partitioner splits each product
    over all free axes, including `replica`.

    - `leaf`: [*batch, *inputs, *outputs] in any order of axes
    - `sides`: the axes of inputs and outputs; all others are batch axes
    - `layout`: the mesh and the mappings; None outside of a mesh
    """
    named = isinstance(leaf, NamedArray)
    names: list[str | int] = [*leaf.axis_names] if named else [*range(leaf.ndim)]
    array = leaf.array if named else leaf
    inputs, outputs = ([names.index(axis) for axis in side] for side in sides)
    batch = [axis for axis in range(array.ndim) if axis not in inputs + outputs]
    order = batch + inputs + outputs
    spec = layout.spec(leaf.axes, layout.params) if layout is not None and named else PartitionSpec()
    split = _split(leaf, sides, layout)

    def shards(local: jax.Array) -> jax.Array:
        ordered = local.transpose(order)
        stack = ordered.reshape(-1, *ordered.shape[len(batch) :])
        whole = _bring_together(stack, split)
        flat = whole.reshape(whole.shape[0], prod(whole.shape[1 : 1 + len(inputs)]), -1)
        done = _newton_schulz(flat, iterations, epsilon).reshape(whole.shape)
        back = _spread_again(done, split)[: stack.shape[0]]
        return back.reshape(ordered.shape).transpose([order.index(axis) for axis in range(len(order))])

    result = shards(array) if layout is None or not named else layout.shard_map(shards, spec, spec)(array)
    return NamedArray(result, leaf.axis_names) if isinstance(leaf, NamedArray) else result


def exchanges(leaf: NamedArray, sides: MatrixAxes, layout: Layout) -> list[Transfer]:
    """Return the transfers of `orthogonalise` in closed form, the same on every backend: all-to-alls of float32.

    There is one each way for every axis of the matrix that is split, over its mesh axes. With `devices` the product of
    the sizes of all these mesh axes, and `matrices` the stack on a device, the bytes of each are

        4 * inputs * outputs * ceil(matrices / devices)

    So more devices than matrices do not reduce them: zero matrices fill up the stack.
    """
    matrices, inputs, outputs = _iterated_on(leaf, sides, layout)
    size = FLOAT32 * matrices * inputs * outputs
    crossed = [
        tuple(axis for axis in layout.mesh.axis_names if axis in axes) for _, axes in _split(leaf, sides, layout)
    ]
    return [Transfer("whole matrices", "all-to-all", axes, size, 2) for axes in crossed]


def iteration_bytes(leaf: NamedArray, sides: MatrixAxes, layout: Layout) -> int:
    """Return a device's bytes for an iteration: matrices before and after it, `x x^T` and its polynomial.

    `4 * 2 * (inputs * outputs + min(inputs, outputs)^2)` for each matrix.
    """
    matrices, inputs, outputs = _iterated_on(leaf, sides, layout)
    return FLOAT32 * 2 * matrices * (inputs * outputs + min(inputs, outputs) ** 2)


def iteration_flops(leaf: NamedArray, sides: MatrixAxes, layout: Layout) -> int:
    """Return a device's FLOPs of an iteration: `a = x x^T` [n, n], `a a`, and a polynomial of both by `x` [n, m].

    With n = min(inputs, outputs) and m the other: `4 n^2 m + 2 n^3` for each matrix, those of zeros too.
    """
    matrices, inputs, outputs = _iterated_on(leaf, sides, layout)
    narrow, wide = sorted((inputs, outputs))
    return matrices * (4 * narrow**2 * wide + 2 * narrow**3)


def _iterated_on(leaf: NamedArray, sides: MatrixAxes, layout: Layout) -> tuple[int, int, int]:
    """Return the number of whole matrices on a device, some of them zero; their inputs; their outputs."""
    inputs, outputs = (prod(leaf.resolve_axis(str(axis)).size for axis in side) for side in sides)
    devices = _devices(layout, [axes for _, axes in _split(leaf, sides, layout)])
    batch = [axis for axis in leaf.axes if axis.name not in sides.inputs + sides.outputs]
    stack = prod(axis.size for axis in batch) // _devices(layout, [layout.mesh_axes(batch, layout.params)])
    return -(-stack // devices), inputs, outputs


def _devices(layout: Layout, mesh_axes: Iterable[tuple[str, ...]]) -> int:
    return prod(layout.mesh.shape[axis] for axes in mesh_axes for axis in axes)


def _split(leaf: NamedArray | jax.Array, sides: MatrixAxes, layout: Layout | None) -> list[tuple[int, tuple[str, ...]]]:
    """Return the indices of the axes of [matrices, *inputs, *outputs] that the mesh splits, with their mesh axes."""
    if layout is None or not isinstance(leaf, NamedArray):
        return []
    splits = dict(zip(leaf.axis_names, layout.splits(leaf.axes, layout.params), strict=True))
    mesh_axes = [splits[str(axis)] for side in sides for axis in side]
    return [(place, axes) for place, axes in enumerate(mesh_axes, 1) if axes]


def _bring_together(stack: jax.Array, split: list) -> jax.Array:
    """Turn [matrices, *sides in shards] into [matrices / devices, *whole sides]; zero matrices fill up the last."""
    devices = prod(jax.lax.axis_size(axes) for _, axes in split)
    stack = jnp.pad(stack, [(0, -stack.shape[0] % devices)] + [(0, 0)] * (stack.ndim - 1))
    for axis, mesh_axes in split:
        stack = jax.lax.all_to_all(stack, mesh_axes, split_axis=0, concat_axis=axis, tiled=True)
    return stack


def _spread_again(stack: jax.Array, split: list) -> jax.Array:
    """Invert `_bring_together`, except that zero matrices stay."""
    for axis, mesh_axes in reversed(split):
        stack = jax.lax.all_to_all(stack, mesh_axes, split_axis=axis, concat_axis=0, tiled=True)
    return stack


def _newton_schulz(stack: jax.Array, iterations: int, epsilon: float) -> jax.Array:
    """Iterate on [matrices, inputs, outputs]: without momentum, optax's transformation is only the iteration.

    Coefficients for each iteration make it a loop. With one set of them it is unrolled, and the compiler keeps the
    products of all iterations, and of all parameters, at the same time.
    """
    transformation = scale_by_muon(
        ns_coeffs=(COEFFICIENTS,) * iterations,
        ns_steps=iterations,
        beta=0.0,
        nesterov=False,
        eps=epsilon,
        weight_dimension_numbers=MuonDimensionNumbers(1, 2),
    )
    return jnp.asarray(transformation.update(stack, transformation.init(stack))[0])
