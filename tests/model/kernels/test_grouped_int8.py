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
from gregale.model.kernels.grouped_int8 import BLOCKED_INT8, integers_of
from gregale.model.kernels.grouped_mlp import GroupedMlp
from gregale.model.kernels.quantised import INT8, Quantised, quantised_product
from gregale.model.kernels.tpu import grouped_int8
from tests.mesh.support import layout_of

SIZES = [5, 0, 130, 1, 0, 40]  # of 190 rows


def gated(gate, up):
    return jax.nn.silu(gate) * up


def operands(embed: int, mlp: int):
    Experts, Embed, Mlp, Rows = Axis("experts", 6), Axis("embed", embed), Axis("mlp", mlp), Axis("row", 190)
    keys, wide = jax.random.split(jax.random.key(0), 6), (Experts, Embed, Mlp)
    weights = [
        hax.random.normal(key, axes) for key, axes in zip(keys, (wide, wide, (Experts, Mlp, Embed)), strict=False)
    ]
    rows, by_rows = (hax.random.normal(key, (Rows, Embed)).array.at[sum(SIZES) :].set(jnp.nan) for key in keys[3:5])
    return weights, rows, by_rows, jax.random.uniform(keys[5], (190, 1))


def computed(products, weights, rows, by_rows, factors):
    mlp, sizes = GroupedMlp(products, gated, 1), jnp.asarray(SIZES, jnp.int32)
    integers = [integers_of(Quantised(INT8, "cpu", (), layout_of()), each, MATRICES) for each in weights]
    inner = mlp.inner(rows, sizes, integers)
    out = mlp.outer(inner, factors, sizes, integers)
    return out, mlp.backward(rows, by_rows, inner, factors, sizes, integers)


@pytest.mark.parametrize(("products", "embed", "mlp"), [("blocked", 24, 40), ("kernels", 128, 256)])
def test_each_experts_products_are_those_of_its_linear_layers(products, embed, mlp, monkeypatch):
    monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=True))
    weights, rows, by_rows, factors = operands(embed, mlp)
    form = BLOCKED_INT8 if products == "blocked" else grouped_int8.MEGABLOX_INT8
    out, (by_x, by_factors, gradients) = jax.jit(partial(computed, form))(weights, rows, by_rows, factors)
    dot = partial(quantised_product, Quantised(INT8, "cpu"))

    def alone(x, factor, gate, up, down):
        hidden = gated(dot(x, gate).array, dot(x, up).array) * factor
        return dot(NamedArray(hidden, ("row", "mlp")), down)

    for group, (end, size) in enumerate(zip(np.cumsum(SIZES), SIZES, strict=True)):
        own, found = slice(end - size, end), [each[group] for each in gradients]
        if size == 0:
            assert not any(np.any(each) for each in found)
            continue
        x, by = (NamedArray(each[own], ("row", "embed")) for each in (rows, by_rows))
        right, backward = jax.vjp(alone, x, factors[own], *(each["experts", group] for each in weights))
        by_own, by_factor, *by_weights = backward(by)
        by_weights = [each.rearrange(MATRICES[1:]).array for each in by_weights]
        exact = [right.array, by_own.array, by_factor[:, 0], *by_weights]
        for mine, theirs in zip([out[own], by_x[own], by_factors[own], *found], exact, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=5e-6 * np.abs(theirs).max())
