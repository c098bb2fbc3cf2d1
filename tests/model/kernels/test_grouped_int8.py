"""Grouped products of 8-bit integers: each group's are those of the linear layers of `compute.matmul: int8`."""

from functools import partial

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from jax.experimental import pallas as pl

from gregale.model.experts import MATRICES
from gregale.model.kernels.grouped import GroupedMlp, GroupedProducts
from gregale.model.kernels.grouped_int8 import BLOCKED_INT8, integers_of
from gregale.model.kernels.quantised import INT8, Quantised, quantised_product
from gregale.model.kernels.tpu.grouped_products import int8_product
from tests.mesh.support import layout_of

SIZES = [5, 0, 130, 1, 0, 40]  # of 190 rows
HOW = Quantised(INT8, "cpu", (), layout_of())


@jax.custom_vjp
def linear(x: NamedArray, weight: NamedArray) -> NamedArray:
    """A linear layer of `compute.matmul: int8` whose gradient by the weight is not of integers."""
    return quantised_product(HOW, x, weight)


def backward(saved, by: NamedArray):
    by_x, _ = jax.vjp(partial(quantised_product, HOW), *saved)[1](by)
    return by_x, hax.dot(saved[0], by, axis="row").rearrange(saved[1].axis_names)


linear.defvjp(lambda x, weight: (linear(x, weight), (x, weight)), backward)


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def one_expert(x: NamedArray, factors: jax.Array, gate: NamedArray, up: NamedArray, down: NamedArray) -> NamedArray:
    hidden = gated(linear(x, gate).array, linear(x, up).array) * factors
    return linear(NamedArray(hidden, ("row", "mlp")), down)


@jax.jit
def with_gradients(x: NamedArray, factors: jax.Array, weights: list[NamedArray], by: NamedArray):
    """The output of `one_expert` and its gradients by each argument."""
    right, derived = jax.vjp(one_expert, x, factors, *weights)
    return right, derived(by)


@pytest.mark.parametrize(("form", "embed", "width"), [("blocks", 24, 40), ("kernel", 256, 128)])
def test_each_experts_products_are_those_of_its_linear_layers(form, embed, width, monkeypatch):
    """Experts without tokens, and NaN beyond the groups; the kernel's blocks have rows of several experts."""
    monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=True))
    Experts, Embed, Mlp, Row = Axis("experts", 6), Axis("embed", embed), Axis("mlp", width), Axis("row", 190)
    keys, last = jax.random.split(jax.random.key(0), 6), (Experts, Mlp, Embed)
    shapes = (Experts, Embed, Mlp), (Experts, Embed, Mlp), last
    weights = [hax.random.normal(key, axes) for key, axes in zip(keys, shapes, strict=False)]
    rows, by_rows = (hax.random.normal(key, (Row, Embed)).array.at[sum(SIZES) :].set(jnp.nan) for key in keys[3:5])
    factors, products = jax.random.uniform(keys[5], (190, 1)), BLOCKED_INT8
    if form == "kernel":
        products = GroupedProducts(partial(int8_product, cores=2), BLOCKED_INT8.weight_gradients)

    @jax.jit
    def all_products(weights):
        mlp, sizes = GroupedMlp(products, gated, 1), jnp.asarray(SIZES, jnp.int32)
        integers = [integers_of(HOW, each, MATRICES) for each in weights]
        inner = mlp.inner(rows, sizes, integers)
        return mlp.outer(inner, factors, sizes, integers), mlp.backward(rows, by_rows, inner, factors, sizes, integers)

    out, (by_x, by_factors, gradients) = jax.device_get(all_products(weights))
    weights, rows, by_rows, factors = jax.device_get((weights, rows, by_rows, factors))
    for group, (end, size) in enumerate(zip(np.cumsum(SIZES), SIZES, strict=True)):
        own, found = slice(end - size, end), [each[group] for each in gradients]
        if size == 0:
            assert not any(np.any(each) for each in found)
            continue
        x, by = (NamedArray(each[own], ("row", "embed")) for each in (rows, by_rows))
        of_group = [NamedArray(each.array[group], each.axis_names[1:]) for each in weights]
        right, (by_own, by_factor, *by_weights) = jax.device_get(with_gradients(x, factors[own], of_group, by))
        exact = [
            right.array,
            by_own.array,
            by_factor[:, 0],
            *(each.rearrange(MATRICES[1:]).array for each in by_weights),
        ]
        for mine, theirs in zip([out[own], by_x[own], by_factors[own], *found], exact, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=5e-6 * np.abs(theirs).max())
