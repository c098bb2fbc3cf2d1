"""The reduction over `replica`: values, shardings, and exactly one collective an array each way."""

from functools import cache, partial

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax.sharding import PartitionSpec

from gregale.axes.layout import EMBED, REPLICA
from gregale.communication.reduce import ExactReducer, all_gather_params
from gregale.cost import audit
from tests.mesh.support import layout_of, placed

Embed, Mlp, Vocab = Axis(EMBED, 16), Axis("mlp", 8), Axis("vocab", 32)


def sums_of(layout):
    generator = np.random.default_rng(0)

    def random(*axes):
        axes = (layout.Replica, *axes)
        return hax.named(generator.standard_normal([axis.size for axis in axes], dtype=np.float32), axes)

    named = {"up": random(Embed, Mlp), "table": random(Vocab, Embed), "bias": random(Mlp), "scale": random()}
    weights = hax.named(np.arange(1.0, layout.replicas + 1, dtype=np.float32), layout.Replica)
    return placed(named, layout, layout.params), placed(weights, layout, layout.params)


def average(layout, sums, weights):
    reducer = ExactReducer(layout)
    return reducer.reduce(sums, *reducer.all_reduce_scalars(weights), None)[0]


@cache
def reduced(layout_sizes):
    layout = layout_of(*layout_sizes)
    sums, weights = sums_of(layout)
    compiled = jax.jit(partial(average, layout)).lower(sums, weights).compile()
    return layout, sums, weights, compiled(sums, weights), audit(compiled, layout.mesh)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (8, 1, 1), (1, 4, 2)])
def test_it_is_the_weighted_mean_under_the_optimizer_state_mapping(sizes):
    layout, sums, weights, result, _ = reduced(sizes)
    for name, mean in result.items():
        assert mean.axes == sums[name].axes[1:]
        expected = np.asarray(sums[name].array, np.float64).sum(0) / np.asarray(weights.array).sum()
        np.testing.assert_allclose(mean.array, expected, rtol=1e-5, atol=1e-6)
        sharding = layout.sharding(mean.axes, layout.opt_state)
        assert mean.array.sharding.is_equivalent_to(sharding, mean.array.ndim)


def test_one_reduce_scatter_an_array_that_is_split_and_one_all_reduce_for_the_others():
    *_, found = reduced((2, 2, 2))
    scattered = sorted(c.bytes for c in found.over(REPLICA) if c.kind == "reduce-scatter")
    assert scattered == [4 * 16 * 8 // 4, 4 * 32 * 16 // 4], "float32, split over data and model"
    rest = [c for c in found.over(REPLICA) if c.kind != "reduce-scatter"]
    assert {c.kind for c in rest} == {"all-reduce"}
    assert sum(c.bytes for c in rest) == 4 * (8 // 2 + 1 + 1), "the bias's shard, the scale and the weights"
    assert all(c.axes == (REPLICA,) for c in found.collectives)


def test_giving_back_is_one_all_gather_an_array():
    layout = layout_of(2, 2, 2)
    tree = {"up": hax.ones((Embed, Mlp)), "table": hax.ones((Vocab, Embed)), "bias": hax.ones(Mlp)}
    tree = placed(tree, layout, layout.opt_state)
    compiled = jax.jit(lambda tree: all_gather_params(tree, layout)).lower(tree).compile()
    found = audit(compiled, layout.mesh).collectives
    assert [(c.kind, c.axes) for c in found] == [("all-gather", (REPLICA,))] * 2
    assert sorted(c.bytes for c in found) == [4 * 16 * 8 // 4, 4 * 32 * 16 // 4]
    assert compiled(tree)["table"].array.sharding.spec == PartitionSpec("model", "data")


def test_plain_arrays_are_reduced_too_as_sums_over_sums():
    """Replicas with few tokens do not count as much as those with many."""
    layout = layout_of(4, 1, 1)
    slopes, weights = jnp.array([1.0, 9.0, 2.0, 3.0]), hax.named(jnp.array([1.0, 3.0, 2.0, 4.0]), layout.Replica)
    result = jax.jit(lambda x: average(layout, {"slope": x}, weights))(slopes)
    assert result["slope"] == pytest.approx(15 / 10)
    assert np.mean(slopes / weights.array) != pytest.approx(1.5)
