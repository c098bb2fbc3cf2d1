"""The lookup and its gradient against numpy in float64, with repeated ids and the table split over devices."""

from __future__ import annotations

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from gregale.axes.layout import BATCH
from gregale.model.embedding import embed
from gregale.model.execution import Execution
from tests.mesh.support import layout_of, placed

Rows, Position, Vocab, Embed = Axis(BATCH, 8), Axis("position", 512), Axis("vocab", 8), Axis("embed", 16)
MESHES = [(1, 1), (4, 1), (1, 8), (2, 4)]


def lookup_and_gradient(data: int, model: int, dtype):
    """Few rows and many ids: every row is looked up some hundred times."""
    layout = layout_of(1, data, model)
    run = Execution(layout=layout.inside_replica(), dtype=jnp.dtype(dtype))
    generator = np.random.default_rng(0)
    table = generator.standard_normal((Vocab.size, Embed.size), dtype=np.float32)
    ids = generator.integers(0, Vocab.size - 1, (Rows.size, Position.size))  # the last id never occurs
    cotangent = generator.uniform(0.5, 1.5, (Rows.size, Position.size, Embed.size)).astype(np.float32)
    cotangent = np.asarray(jnp.asarray(cotangent, dtype), np.float32)

    @jax.jit
    def call(table, ids):
        found, back = jax.vjp(lambda table: embed(run.gathered(table), ids, run).array, table)
        return found, back(jnp.asarray(cotangent, dtype))[0].array

    found, gradient = call(
        placed(hax.named(table, (Vocab, Embed)), layout, layout.params),
        placed(hax.named(ids, (Rows, Position)), layout, layout.compute),
    )
    expected = np.zeros(table.shape)
    np.add.at(expected, ids, cotangent.astype(np.float64))
    return table, ids, found, gradient, expected


@pytest.mark.parametrize(("data", "model"), MESHES)
def test_lookup_and_gradient_in_float32(data, model):
    table, ids, found, gradient, expected = lookup_and_gradient(data, model, jnp.float32)
    np.testing.assert_array_equal(found, table[ids])
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)
    assert (np.asarray(gradient)[-1] == 0).all()


@pytest.mark.parametrize(("data", "model"), MESHES)
def test_gradient_in_bfloat16_adds_up_in_float32(data, model):
    """A sum of 500 ones in bfloat16 stops at 256; added in float32 and rounded at the end it is right."""
    table, ids, found, gradient, expected = lookup_and_gradient(data, model, jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, jnp.asarray(table, jnp.bfloat16)[ids])
    assert gradient.dtype == jnp.float32, "the table's own dtype"
    # One rounding to bfloat16 for a device's sum, and one for each addition over `data`.
    np.testing.assert_allclose(gradient, expected, rtol=(1 + data) * 2**-8)


def test_a_sum_in_bfloat16_would_be_far_off():
    """So the tolerance above tells the two apart."""
    ids = np.repeat(np.arange(Vocab.size), Position.size)
    added = jnp.zeros(Vocab.size, jnp.bfloat16).at[ids].add(jnp.ones(ids.size, jnp.bfloat16))
    assert (np.asarray(added, np.float32) < 0.9 * Position.size).all()
