"""RMSNorm against Haliax's, values and gradients."""

import haliax as hax
import haliax.nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from gregale.model.norm import RmsNorm
from tests.mesh.support import one_device

Batch, Embed, Position = Axis("batch", 3), Axis("embed", 8), Axis("position", 5)


@pytest.mark.parametrize("axes", [(Batch, Position, Embed), (Embed, Batch, Position)], ids=["last", "first"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_equals_haliax_with_gradients(axes, dtype):
    weight = hax.random.normal(jax.random.key(1), Embed)
    ours = RmsNorm(weight, 1e-3)
    run = one_device()
    theirs = haliax.nn.RmsNorm(Embed, weight, None, 1e-3, jnp.float32)
    x, cotangent = (hax.random.normal(jax.random.key(seed), axes).astype(dtype) for seed in (2, 3))

    def value_and_gradients(norm, *arguments):
        return jax.value_and_grad(lambda norm, x: hax.sum(norm(x, *arguments) * cotangent).scalar(), argnums=(0, 1))(
            norm, x
        )

    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == jnp.float32 else {"rtol": 0.05, "atol": 0.05}
    (value, found), (expected_value, expected) = value_and_gradients(ours, run), value_and_gradients(theirs)
    np.testing.assert_allclose(np.float32(value), np.float32(expected_value), **tolerance)
    np.testing.assert_allclose(found[0].weight.array, expected[0].weight.array, **tolerance)
    np.testing.assert_allclose(np.float32(found[1].array), np.float32(expected[1].array), **tolerance)
