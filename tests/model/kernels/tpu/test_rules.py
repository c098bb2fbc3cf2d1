"""The TPU's rules of differentiation against the plain form, and what they leave of it in a program."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from gregale.model.kernels.tpu.kernels import tpu_kernels
from gregale.model.layers import rotate
from gregale.model.llama import LlamaConfig
from tests.model.kernels.forms import assert_equal

TPU = tpu_kernels()
Batch, Position, Heads, HeadSize = Axis("batch", 2), Axis("position", 6), Axis("heads", 3), Axis("head_size", 8)

each_dtype = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])


@each_dtype
def test_swiglu(dtype):
    gate, up = (4 * hax.random.normal(jax.random.key(seed), (Batch, Position, HeadSize)) for seed in (0, 1))
    assert_equal(lambda kernels: kernels.swiglu, TPU, (gate, up.rearrange((HeadSize, Batch, Position))), dtype)


@each_dtype
@pytest.mark.parametrize("known", [False, True])
def test_rms_norm(dtype, known):
    """Also with the mean square of another computation, whose derivative is in the rule."""
    x, weight = hax.random.normal(jax.random.key(0), (Batch, Position, HeadSize)), hax.arange(HeadSize) - 1.5

    def form(kernels):
        def norm(x, weight):
            square = jax.lax.stop_gradient(jnp.mean(jnp.square(x.array.astype(jnp.float32)), axis=-1))
            return kernels.rms_norm(x, weight, 1e-3, square if known else None)

        return norm

    assert_equal(form, TPU, (3 * x, weight), dtype)


def test_the_gradient_of_a_norms_weight_is_summed_in_float32():
    x, weight = jnp.ones((4096, 2), jnp.bfloat16), hax.named(jnp.ones(2, jnp.bfloat16), "embed")
    gradient = jax.grad(lambda w: hax.sum(TPU.rms_norm(hax.named(x, ("row", "embed")), w, 0.0)).scalar())(weight)
    np.testing.assert_array_equal(gradient.array, 4096)


@each_dtype
def test_rotation(dtype):
    """Also of positions that differ from row to row, and with heads before positions."""
    config = LlamaConfig(heads=3, kv_heads=3, hidden=24)
    x = hax.random.normal(jax.random.key(0), (Batch, Heads, Position, HeadSize))
    places = hax.random.randint(jax.random.key(1), (Batch, Position), 0, 9000)

    def form(kernels):
        return lambda x: rotate(x, places, config, kernels)

    assert_equal(form, TPU, (x,), dtype)


def test_rotation_rounds_once():
    """The swap is exact: what is turned is what float32 makes of it, rounded."""
    x = jax.random.normal(jax.random.key(0), (16, 8)).astype(jnp.bfloat16)
    angle = jax.random.uniform(jax.random.key(1), (16, 4), maxval=100.0)
    exact = TPU.rotate(x.astype(jnp.float32), angle)
    np.testing.assert_array_equal(TPU.rotate(x, angle), exact.astype(jnp.bfloat16))
