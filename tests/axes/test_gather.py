"""Gathering weights: the bytes of the compute dtype on the way out, the shard of `params` on the way back."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from jax.sharding import PartitionSpec

from gregale.axes.gather import all_gather_weights, scattered
from gregale.axes.layout import EMBED
from gregale.cost import audit
from tests.mesh.support import layout_of, placed

Rows, Embed, Mlp = Axis("rows", 12), Axis(EMBED, 16), Axis("mlp", 8)


def test_values_gradients_and_shardings():
    layout = layout_of(1, 4, 2).inside_replica()
    generator = np.random.default_rng(0)
    weights = hax.named(generator.standard_normal((16, 8), dtype=np.float32), (Embed, Mlp))
    x = hax.named(generator.standard_normal((12, 16), dtype=np.float32), (Rows, Embed))

    def loss(weights):
        tree = {"weights": weights, "steps": jnp.arange(3), "scale": jnp.ones(3)}
        ready = all_gather_weights(tree, layout, jnp.dtype(jnp.bfloat16))
        assert (ready["steps"].dtype, ready["scale"].dtype) == (jnp.int32, jnp.bfloat16)
        product = hax.dot(x.astype(jnp.bfloat16), ready["weights"], axis=Embed)
        return hax.sum(product.astype(jnp.float32)).scalar(), ready["weights"]

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, ready), gradient = step(placed(weights, layout, layout.params))
    assert ready.dtype == jnp.bfloat16
    assert ready.array.sharding.spec == PartitionSpec(None, "model")
    np.testing.assert_array_equal(ready.array, weights.array.astype(jnp.bfloat16))
    assert gradient.dtype == jnp.float32
    assert gradient.array.sharding.spec == PartitionSpec("data", "model")
    expected = np.broadcast_to(np.asarray(x.array).sum(0)[:, None], (16, 8))
    np.testing.assert_allclose(gradient.array, expected, atol=0.1)


def test_one_gather_over_data_and_nothing_over_other_axes():
    layout = layout_of(2, 2, 2).inside_replica()
    weights = placed(hax.ones((Embed, Mlp)), layout, layout.params)
    compiled = jax.jit(lambda w: all_gather_weights(w, layout, jnp.dtype(jnp.float32))).lower(weights).compile()
    found = audit(compiled, layout.mesh).collectives
    assert [(c.kind, c.axes, c.bytes) for c in found] == [("all-gather", ("data",), 4 * 16 * 8 // 2)]


def test_scattered_sums_over_all_axes_and_keeps_the_own_shard():
    layout = layout_of(2, 2, 2)

    def local(addend):
        own = addend[0, 0] * (1.0 + jax.lax.axis_index("replica") + 2 * jax.lax.axis_index("data"))
        return scattered(own, (Embed, Mlp), ("replica", "data"), layout)

    addend = np.random.default_rng(0).standard_normal((2, 2, 16, 8)).astype(np.float32)
    call = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=PartitionSpec("replica", "data", None, "model"),
        out_specs=PartitionSpec("data", "model"),
        check_vma=False,
    )
    result = jax.jit(call)(addend)
    factors = np.array([[1.0, 3.0], [2.0, 4.0]])
    np.testing.assert_allclose(result, np.einsum("rdem,rd->em", addend, factors), atol=1e-5)
