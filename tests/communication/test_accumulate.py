"""Accumulated sums against sums over all rows at once; how rows are cut; what is refused."""

import re

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from hypothesis import given
from hypothesis import strategies as st

from gregale.axes.layout import BATCH, EMBED
from gregale.communication.reduce import accumulate, rows_per_part, split_batch
from gregale.errors import UserError
from tests.mesh.support import bare_layout, layout_of, placed

Rows, Embed = Axis(BATCH, 16), Axis(EMBED, 8)


def loss(weights, batch):
    """Weighted squares of a linear prediction: (sum, sum of weights)."""
    error = hax.dot(batch["x"], weights, axis=Embed) - batch["y"]
    return hax.sum(error * error * batch["weight"]).scalar(), hax.sum(batch["weight"]).scalar()


def problem():
    generator = np.random.default_rng(0)
    batch = {
        "x": hax.named(generator.standard_normal((16, 8), dtype=np.float32), (Rows, Embed)),
        "y": hax.named(generator.standard_normal(16, dtype=np.float32), Rows),
        "weight": hax.named(np.linspace(0, 1, 16, dtype=np.float32), Rows),
    }
    return hax.named(generator.standard_normal(8, dtype=np.float32), Embed), batch


@pytest.mark.parametrize(("sizes", "microbatches"), [((2, 2, 1), 4), ((8, 1, 1), 1)])
def test_sums_of_each_replica_are_those_of_its_own_rows_after_one_preparation(sizes, microbatches):
    layout = layout_of(*sizes)
    weights, batch = problem()
    calls = []

    def prepare(weights):
        calls.append(weights)
        return weights * 2.0

    def call(weights, batch):
        return accumulate(loss, weights, batch, layout, microbatches, prepare)

    sums = jax.jit(call)(placed(weights, layout, layout.params), placed(batch, layout, layout.compute))
    assert len(calls) == 1, "outside of the loop"
    each = Rows.size // layout.replicas
    assert sums.gradients.axes == (layout.Replica, Embed)
    expected = layout.sharding(sums.gradients.axes, layout.params)
    assert sums.gradients.array.sharding.is_equivalent_to(expected, 2)
    for replica in range(layout.replicas):
        own = {name: leaf[BATCH, replica * each : (replica + 1) * each] for name, leaf in batch.items()}
        (value, weight), gradient = jax.value_and_grad(loss, has_aux=True)(weights * 2.0, own)
        np.testing.assert_allclose(sums.loss.array[replica], value, rtol=1e-5)
        np.testing.assert_allclose(sums.weight.array[replica], weight, rtol=1e-6)
        np.testing.assert_allclose(sums.gradients.array[replica], gradient.array, atol=1e-5, rtol=1e-5)

    low = weights.astype(jnp.bfloat16)
    assert jax.eval_shape(call, low, batch).gradients.dtype == jnp.float32, "also of low-precision parameters"


def test_every_device_keeps_its_own_rows():
    layout = layout_of(2, 4, 1)
    rows = placed({"row": hax.arange(Axis(BATCH, 32))}, layout, layout.compute)
    split = jax.jit(lambda batch: split_batch(batch, layout, 2))(rows)["row"]
    assert [axis.name for axis in split.axes] == ["replica", "microbatch", "batch"]
    before = {shard.device: set(np.asarray(shard.data).ravel()) for shard in rows["row"].array.addressable_shards}
    after = {shard.device: set(np.asarray(shard.data).ravel()) for shard in split.array.addressable_shards}
    assert before == after


def test_plain_arrays_are_cut_as_named_ones_are():
    layout = layout_of(2, 2, 1)
    plain = np.arange(48).reshape(16, 3)
    named = split_batch(hax.named(plain, (Rows, Axis("column", 3))), layout, 4)
    np.testing.assert_array_equal(split_batch(jnp.asarray(plain), layout, 4), named.array)


parts = st.sampled_from([1, 2, 3, 4, 8])


@given(st.integers(1, 200), parts, parts, parts)
def test_the_batch_sizes_that_a_refusal_offers_work(rows, replicas, shards, microbatches):
    layout = bare_layout(replicas, shards)
    count = replicas * shards * microbatches
    if rows % count == 0:
        assert rows_per_part(rows, layout, microbatches) * count == rows
        return
    with pytest.raises(UserError) as error:
        rows_per_part(rows, layout, microbatches)
    message = str(error.value)
    assert f"batch.size is {rows}" in message
    assert f"replica {replicas} x data {shards} x microbatches {microbatches} = {count} parts" in message
    offered = re.search(r"batch.size (\d+)(?: or (\d+))? would work", message).groups()
    for value in filter(None, offered):
        assert rows_per_part(int(value), layout, microbatches) >= 1
        assert abs(int(value) - rows) < count
