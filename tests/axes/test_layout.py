"""The three mappings, what they do to shards, and what is refused before anything is compiled."""

import re
from math import prod

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from gregale.axes.layout import BATCH, EMBED, POSITION, REPLICA, check_divides, check_used, named_arrays, vmap_over
from gregale.errors import UserError
from tests.mesh.support import bare_layout, layout_of, placed, small_model


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2, 1), (8, 1, 1), (1, 2, 4)])
def test_a_shard_of_the_optimizer_state_is_a_slice_of_the_device_own_parameter_shard(sizes):
    layout = layout_of(*sizes)
    model = small_model()
    parameters = placed(model, layout, layout.params)
    state = placed(model, layout, layout.opt_state)
    for whole, cut in zip(named_arrays(parameters), named_arrays(state), strict=True):
        own = {shard.device: shard.index for shard in whole.array.addressable_shards}
        factor = sizes[0] if any(axis.name == EMBED for axis in whole.axes) else 1
        for shard in cut.array.addressable_shards:
            assert shard.data.size * factor == prod(whole.array.sharding.shard_shape(whole.array.shape))
            for outer, inner, axis in zip(own[shard.device], shard.index, whole.axes, strict=True):
                assert set(range(axis.size)[inner]) <= set(range(axis.size)[outer])


def test_the_other_order_of_axes_would_not_be_a_slice():
    layout = layout_of(2, 4, 1)
    table = hax.zeros((Axis("vocab", 64), Axis(EMBED, 32)))
    own = placed(table, layout, layout.params).array
    other = placed(table, layout, {EMBED: (REPLICA, "data")}).array
    ranges = [
        (set(range(32)[a.index[1]]), set(range(32)[b.index[1]]))
        for a, b in zip(own.addressable_shards, other.addressable_shards, strict=True)
    ]
    assert not all(inner <= outer for outer, inner in ranges)


def test_mappings_are_those_of_the_design():
    layout = layout_of(2, 2, 2)
    axes = (Axis("vocab", 64), Axis(EMBED, 32))
    assert layout.spec(axes, layout.compute) == PartitionSpec("model", None)
    assert layout.spec(axes, layout.params) == PartitionSpec("model", "data")
    assert layout.spec(axes, layout.opt_state) == PartitionSpec("model", ("data", "replica"))
    assert layout.spec((BATCH, "position"), layout.compute) == PartitionSpec(("island", "replica", "data"), None)
    assert layout.mesh_axes((BATCH, EMBED), layout.compute) == ("island", "replica", "data")
    assert layout.mesh_axes((EMBED, "position"), layout.opt_state) == ("data", "replica")

    inner = layout.inside_replica()
    for mapping in (inner.compute, inner.params, inner.opt_state):
        assert all(REPLICA not in axes for axes in mapping.values())
    assert inner.compute[BATCH][-1:] == inner.params[EMBED] == inner.opt_state[EMBED] == ("data",)
    assert (inner.replicas, layout.replicas) == (1, 2)
    assert inner.inside_replica() == inner

    stages = layout_of(replica=2, stage=2, data=2)  # they split rows and parameters as `data` does
    assert stages.mesh_axes((BATCH,), stages.compute) == ("island", "replica", "data", "stage")
    assert stages.mesh_axes((EMBED,), stages.params) == ("data", "stage")
    assert stages.mesh_axes((EMBED,), stages.opt_state) == ("data", "stage", "replica")
    shared = layout_of(replica=2, context=2, data=2)
    assert shared.mesh_axes((POSITION,), shared.compute) == ("context",)
    assert shared.mesh_axes((EMBED,), shared.params) == ("context", "data")
    assert shared.mesh_axes((EMBED,), shared.opt_state) == ("context", "data", "replica")


def test_shardings_of_plain_and_named_arrays():
    layout = layout_of(2, 2, 2)
    tree = {"named": hax.zeros((Axis("layers", 3), Axis(EMBED, 8))), "plain": jnp.zeros(3), "none": None}
    shardings = layout.shardings(tree, layout.params)
    assert jax.tree.structure(shardings) == jax.tree.structure(tree)
    assert shardings["named"].array.spec == PartitionSpec(None, "data")
    assert shardings["plain"].spec == PartitionSpec()
    constrained = jax.jit(lambda tree: layout.constrain(tree, layout.opt_state))(tree)
    assert constrained["named"].array.sharding.spec == PartitionSpec(None, ("data", "replica"))


def test_vmap_over_replicas_keeps_each_on_its_own_devices():
    layout = layout_of(2, 2, 2)
    Rows = Axis("rows", 6)
    x = hax.named(np.arange(12.0).reshape(2, 6), (layout.Replica, Rows))
    seen = []

    def one(x, plain):
        seen.append((x.axes, plain.shape))
        return hax.sum(x) * plain[0]

    plain = jnp.array([[1.0, 0.0], [10.0, 0.0]])
    result = jax.jit(lambda x, plain: vmap_over(one, REPLICA, layout)(x, plain))(
        placed(x, layout, layout.params), plain
    )
    assert seen[0] == ((Rows,), (2,))
    np.testing.assert_array_equal(result.array, [15.0, 510.0])
    assert result.array.sharding.spec == PartitionSpec(REPLICA)


sizes = st.sampled_from([1, 2, 3, 4, 8])
EVERY_AXIS = {"batch.size": BATCH, "model.hidden": EMBED, "model.heads": "heads", "model.mlp": "mlp"}


@given(sizes, sizes, sizes, st.sampled_from(list(EVERY_AXIS)), st.integers(1, 300))
def test_the_sizes_that_a_refusal_offers_work(replica, data, model, key, size):
    layout = bare_layout(replica, data, model)
    divisor = {BATCH: replica * data, EMBED: data * replica}.get(EVERY_AXIS[key], model)

    def axes(size: int):
        good = replica * data * model
        return {name: ("it", Axis(axis, size if name == key else good)) for name, axis in EVERY_AXIS.items()}

    if size % divisor == 0:
        check_divides(layout, axes(size))
        return
    with pytest.raises(UserError) as error:
        check_divides(layout, axes(size))
    message = str(error.value)
    assert message.startswith(f"{key} is {size}: it would be split over ")
    assert f"= {divisor} devices, and {size} / {divisor} = {size / divisor:.4g} is not a whole number" in message
    offered = [int(value) for value in re.search(rf"{key} (\d+)(?: or (\d+))? would work", message).groups() if value]
    assert offered
    for value in offered:
        check_divides(layout, axes(value))
        assert abs(value - size) < divisor


@pytest.mark.parametrize("unused", ["model", "data", "replica"])
def test_a_mesh_axis_that_splits_nothing_is_refused(unused):
    check_used(bare_layout(), ["rows"])
    with pytest.raises(UserError, match=f"mesh.{unused} is 2, but nothing .*Set mesh.{unused} to 1"):
        check_used(bare_layout(**{unused: 2}), ["rows"])
