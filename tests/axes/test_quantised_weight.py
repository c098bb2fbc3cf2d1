"""Weights in blocks of few bits, with NumPy as the oracle."""

import haliax as hax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from haliax import NamedArray

from gregale.axes.gather import all_gather_weights
from gregale.axes.parameters import QuantisedWeight, decoded
from gregale.model.adapters import CODECS
from tests.mesh.support import layout_of

# The values of the paper's appendix.
TABLE = """-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0"""
NF4 = np.array(TABLE.split(","), np.float32)


def dequantised(weight: np.ndarray, place: int, base: str) -> np.ndarray:
    """A weight after quantisation in blocks of 64 along an axis, float32, as the definitions say."""
    last = np.moveaxis(weight, place, -1).astype(np.float32)
    blocks = last.reshape(-1, 64)
    high, low = blocks.max(1, keepdims=True), blocks.min(1, keepdims=True)
    peak = np.where(high > -low, high, low)
    scale = (np.abs(peak) if base == "nf4" else -peak / 128).astype(ml_dtypes.bfloat16).astype(np.float32)
    scaled = blocks * np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    nearest = NF4[np.abs(scaled[..., None] - NF4).argmin(-1)]
    values = nearest if base == "nf4" else np.clip(np.round(scaled), -128, 127)
    return np.moveaxis((values * scale).reshape(last.shape), -1, place)


def made(base: str, along: str = "embed") -> tuple[NamedArray, QuantisedWeight]:
    array = np.random.default_rng(1).standard_t(3, (2, 4, 128, 6)).astype(np.float32)
    array[1, 2, :64, 3] = 0
    weight = hax.named(jnp.asarray(array), ("layers", "heads", "embed", "mlp"))
    return weight, jax.jit(QuantisedWeight.of, static_argnums=(1, 2))(weight, CODECS[base], along)


@pytest.mark.parametrize(("base", "bits", "error"), [("int8", 8.25, 0.02), ("nf4", 4.25, 0.2)])
def test_values_are_those_of_numpy_on_one_device_and_gathered_in_bits(base, bits, error):
    weight, held = made(base)
    exact = np.asarray(weight.array)
    expected = dequantised(exact, 2, base)
    np.testing.assert_array_equal(held.decoded(jnp.dtype("float32")).array, expected)
    assert 0 < np.linalg.norm(expected - exact) / np.linalg.norm(exact) < error
    assert (held.axes, held.size) == (weight.axes, exact.size)
    assert 8 * sum(leaf.nbytes for leaf in jax.tree.leaves(held)) == bits * exact.size
    layout = layout_of(data=2, model=2)
    dtype = jnp.dtype("bfloat16")
    found = jax.jit(lambda held: decoded(all_gather_weights({"one": held}, layout, dtype), dtype))(
        jax.device_put(held, layout.shardings(held, layout.params))
    )["one"]
    np.testing.assert_array_equal(found.array, expected.astype(ml_dtypes.bfloat16))
