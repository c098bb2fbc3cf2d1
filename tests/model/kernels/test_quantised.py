"""Products of 8-bit numbers against a rewrite in NumPy with exact integers, on one device and in parts on a mesh."""

import re
from functools import partial
from math import prod

import haliax as hax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from haliax import Axis, NamedArray
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from gregale.axes.gather import all_gather_weights
from gregale.model.kernels.quantised import FORMATS, INT8, Quantised, in_eight_bits, quantised_mlp, quantised_product
from gregale.model.kernels.tpu import products
from gregale.model.kernels.tpu.kernels import SWIGLU
from tests.cost.steps import lowered_step, small_setup
from tests.mesh.support import layout_of

Batch, Position = Axis("batch", 4), Axis("position", 6)
Embed, Heads, HeadSize = Axis("embed", 24), Axis("heads", 4), Axis("head_size", 8)
PARTS = {"batch": 2, "position": 3, "heads": 2}
ON_DEVICES = {"batch": "data", "heads": "model"}  # axes of a mesh


@partial(jax.jit, static_argnums=(0, 1))
def operands(In: tuple[Axis, ...], Out: tuple[Axis, ...]) -> tuple[NamedArray, NamedArray, NamedArray]:
    """Values, a weight and a gradient; sizes of rows differ, and one row is zero."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((Batch, Position, *In), (*In, *Out), (Batch, Position, *Out))
    x, weight, gradient = (hax.random.normal(key, axes) for key, axes in zip(keys, shapes, strict=True))
    sizes = hax.arange(Position).astype(jnp.float32)
    return x * sizes, weight, gradient * (1 + sizes)


def all_products(how: Quantised, x, weight, gradient):
    product, backward = jax.vjp(partial(quantised_product, how), x, weight)
    return product, *backward(gradient)


def numbers(x: np.ndarray, axis: int, dtype, largest: float) -> tuple[np.ndarray, np.ndarray]:
    most = np.maximum(np.abs(x).max(axis, keepdims=True), np.float32(1e-30))
    scaled = x * (np.float32(largest) / most)
    rounded = np.rint(scaled) if largest == 127 else scaled.astype(dtype)
    return rounded.astype(np.float64), (most / np.float32(largest)).astype(np.float64)


def in_parts(size: int, parts: int) -> list[slice]:
    return [slice(part * size // parts, (part + 1) * size // parts) for part in range(parts)]


def rewritten(name: str, x, weight, gradient, rows: list[np.ndarray], inputs: list[slice], outputs: list[slice]):
    """The three products of matrices, part by part of the axis over which each contracts."""
    low, high = (ml_dtypes.float8_e4m3fn, 448), (ml_dtypes.float8_e5m2, 57344)
    low, high = ((np.int8, 127), (np.int8, 127)) if name == "int8" else (low, high)
    found = [np.zeros(x.shape[:1] + weight.shape[1:]), np.zeros(x.shape), np.zeros(weight.shape)]
    for some in inputs:
        (X, sx), (W, sw) = numbers(x[:, some], 1, *low), numbers(weight[some], 0, *low)
        found[0] += X @ W * sx * sw
        for part in outputs:
            A, sa = numbers((gradient * sw.astype(np.float32))[:, part], 1, *high)
            found[1][:, some] += A @ W[:, part].T * sa
        for part in rows:
            (C, sc), (B, sb) = numbers(x[part, some], 0, *low), numbers(gradient[part], 0, *high)
            found[2][some] += (C * sc).T @ (B * sb)
    return found


@pytest.fixture
def interpreted(monkeypatch):
    """Runs the kernels for TPU on the CPU."""
    monkeypatch.setattr(products.pl, "pallas_call", partial(pl.pallas_call, interpret=True))


QUERY = (Embed,), (Heads, HeadSize)
OUT = (Heads, HeadSize), (Embed,)


@pytest.mark.parametrize(
    ("name", "axes", "shared", "platform"),
    [("int8", QUERY, False, "cpu"), ("int8", OUT, True, "gpu"), ("fp8", QUERY, True, "gpu")],
)
def test_all_three_products_are_those_of_the_rewrite(name, axes, shared, platform):
    operation = operands(*axes)
    parts = PARTS if shared else {}
    how = Quantised(FORMATS[name], platform, tuple(parts.items()))
    found = jax.jit(partial(all_products, how))(*operation)

    place = np.arange(Batch.size * Position.size).reshape(Batch.size, Position.size)
    cut = {name: in_parts(size, parts.get(name, 1)) for name, size in (("batch", 4), ("position", 6), ("heads", 32))}
    rows = [place[one, two].ravel() for one in cut["batch"] for two in cut["position"]]
    width = [prod(axis.size for axis in each) for each in axes]
    features = [cut["heads"] if Heads in each else [slice(0, size)] for each, size in zip(axes, width, strict=True)]
    shapes = ((-1, width[0]), tuple(width), (-1, width[1]))
    x, weight, gradient = (np.asarray(each.array).reshape(to) for each, to in zip(operation, shapes, strict=True))
    expected = rewritten(name, x, weight, gradient, rows, features[0], features[1])
    for ours, theirs, like in zip(found, expected, (operation[2], *operation[:2]), strict=True):
        assert ours.axes == like.axes
        right = theirs.reshape([axis.size for axis in like.axes])
        np.testing.assert_allclose(ours.array, right, rtol=0, atol=2e-6 * np.abs(right).max())


def test_on_a_mesh_only_the_sums_of_parts_cross_devices():
    layout = layout_of(data=2, model=2)
    how = Quantised(INT8, "cpu", (("batch", 2), ("heads", 2)))
    out, run = operands(*OUT), jax.jit(partial(all_products, how))

    def placed(x: NamedArray) -> NamedArray:
        spec = PartitionSpec(*(ON_DEVICES.get(name) for name in x.axis_names))
        return jax.device_put(x, NamedSharding(layout.mesh, spec))

    compiled = run.lower(*map(placed, out)).compile()
    for ours, theirs in zip(compiled(*map(placed, out)), run(*out), strict=True):
        np.testing.assert_allclose(ours.array, theirs.array, rtol=0, atol=1e-6 * np.abs(theirs.array).max())
    sent = re.findall(
        r"= (\S+?)\{\S* (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", str(compiled.as_text())
    )
    # The product, summed over `model`, and the gradient by the weight, over `data`: a device's parts of both.
    assert sorted(sent) == [("f32[1,2,6,24]", "all-reduce"), ("f32[1,2,8,24]", "all-reduce")]


def test_devices_gather_the_8_bit_numbers_of_a_weight():
    """The largest values are those of all shards, and the gradient passes as without."""
    layout = layout_of(data=2)
    how = Quantised(INT8, "cpu", (("batch", 2),), layout)
    x, weight, gradient = operands(*QUERY)

    def product(x, weight):
        exact = all_gather_weights(weight, layout, jnp.dtype(jnp.float32))
        return quantised_product(how, x, in_eight_bits(how, exact, weight, ["embed"]))

    def all_three(x, weight, gradient):
        found, backward = jax.vjp(product, x, weight)
        return found, *backward(gradient)

    mappings = layout.compute, layout.params, layout.compute
    given = [
        jax.device_put(each, layout.shardings(each, mapping))
        for each, mapping in zip((x, weight, gradient), mappings, strict=True)
    ]
    compiled = jax.jit(all_three).lower(*given).compile()
    expected = jax.jit(partial(all_products, how))(x, weight, gradient)
    for ours, theirs in zip(compiled(*given), expected, strict=True):
        np.testing.assert_allclose(ours.array, theirs.array, rtol=0, atol=1e-6 * np.abs(theirs.array).max())
    text = str(compiled.as_text())
    assert {kind[:2] for kind in re.findall(r"= (\S+?)\{\S* all-gather(?:-start)?\(", text)} == {"s8"}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("axes", [QUERY, OUT])
def test_kernels_on_a_mesh_quantise_as_xla(axes):
    layout = layout_of(data=2, model=2)
    wide = {"position": 128, "embed": 128, "head_size": 128}  # whole tiles, so that kernels read heads apart

    def widened(x: NamedArray) -> NamedArray:
        sizes = tuple(wide.get(axis.name, axis.size) for axis in x.axes)
        return NamedArray(jax.random.normal(jax.random.key(len(sizes)), sizes), x.axis_names)

    operation, parts = [widened(each) for each in operands(*axes)], (("batch", 2), ("heads", 2))
    found = jax.jit(partial(all_products, Quantised(INT8, "tpu", parts, layout)))(*operation)
    expected = jax.jit(partial(all_products, Quantised(INT8, "gpu", parts)))(*operation)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.array, theirs.array, rtol=0, atol=2e-6 * np.abs(theirs.array).max())


@pytest.mark.usefixtures("interpreted")
def test_an_mlp_as_one_operation_quantises_as_its_parts():
    """Up to the last bit of a few integers, because their sums are of another order."""
    layout = layout_of(data=2, model=2)
    Rows, Mlp, In = Axis("position", 64), Axis("mlp", 512), Axis("embed", 128)
    parts = (("batch", 2), ("mlp", 2))
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (Batch, Rows, In), (In, Mlp), (In, Mlp), (Mlp, In), (Batch, Rows, In)
    x, *weights, gradient = (hax.random.normal(key, axes) for key, axes in zip(keys, shapes, strict=True))

    def whole(x, weights):
        return quantised_mlp(Quantised(INT8, "tpu", parts, layout), x, weights)

    def in_parts(x, weights):
        dot = partial(quantised_product, Quantised(INT8, "gpu", parts))
        gate, up, down = weights
        return dot(SWIGLU(dot(x, gate), dot(x, up)), down)

    def results(run, x, weights, gradient):
        product, backward = jax.vjp(run, x, weights)
        return jax.tree.leaves((product, backward(gradient)))

    found, expected = (jax.jit(partial(results, run))(x, tuple(weights), gradient) for run in (whole, in_parts))
    for ours, theirs in zip(found, expected, strict=True):
        error = np.abs(np.asarray(ours) - theirs) / np.abs(theirs).max()
        assert error.max() < 2e-3, error.max()
        assert np.median(error) < 1e-6, np.median(error)


@pytest.mark.usefixtures("compiled_anew")
def test_weights_that_are_gathered_once_a_step_are_quantised_after_that():
    """Their gradients are those of gathered weights, so these stay in the compute dtype."""
    text = lowered_step(small_setup((1, 2, 1), 1, {"gather": "per_step", "matmul": "int8"})).as_text()
    assert "xi8>" in text


def test_kernels_read_heads_apart_if_those_of_one_fit_vector_memory():
    def matrix(rows: int, width: int) -> tuple[int, ...]:
        x = jax.ShapeDtypeStruct((4, rows, 4, width), jnp.bfloat16)
        return jax.eval_shape(lambda x: products.heads_first(x, [4, rows], [4, width]), x).shape

    assert matrix(8192, 128) == (4, 4, 8192, 128)
    assert matrix(8192, 256) == (1, 1, 4 * 8192, 4 * 256)


def test_a_tpu_holds_the_left_operand_of_the_weights_gradient_turned():
    """In memory, by the compiled program: the compiler would multiply a turned view, as slowly as bfloat16."""
    device = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]

    def shape(*axes: Axis) -> NamedArray:
        sizes = tuple(axis.size for axis in axes)
        array = jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=SingleDeviceSharding(device))
        return NamedArray(array, tuple(axis.name for axis in axes))

    rows, embed, mlp = Axis("batch", 1024), Axis("embed", 256), Axis("mlp", 512)
    run = jax.jit(lambda *operands: all_products(Quantised(INT8, "tpu"), *operands)[2])
    text = str(run.lower(shape(rows, embed), shape(embed, mlp), shape(rows, mlp)).compile().as_text())
    assert "s8[256,1024]{1,0:" in text
