"""Muon on a mesh: whole matrices come together by all-to-all, and nothing but the updates crosses `replica`."""

import re
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from math import prod

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from gregale.axes.layout import Layout, MeshConfig, make_mesh, standard_layout
from gregale.cost import audit
from gregale.cost.work import work_of
from gregale.optim import MuonConfig, Optimizer

Layers, Embed, Mlp = Axis("layers", 3), Axis("embed", 16), Axis("mlp", 32)
Heads, HeadSize = Axis("heads", 4), Axis("head_size", 4)
AXES = {
    "query": (Layers, Embed, Heads, HeadSize),
    "output": (Layers, Heads, HeadSize, Embed),
    "up": (Layers, Embed, Mlp),
    "single": (Mlp, Embed),
    "norm": (Layers, Embed),
}
COLLECTIVE = re.compile(r" (all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(")
CONFIG = MuonConfig(iterations=3)


def tree(seed: int):
    random = np.random.default_rng(seed)
    draw = lambda axes: random.normal(size=[axis.size for axis in axes]).astype(np.float32)  # noqa: E731
    return {name: hax.named(jnp.asarray(draw(axes)), axes) for name, axes in AXES.items()}


@lru_cache
def expected(seed: int, config: MuonConfig = CONFIG):
    """The updates of one device, for the gradients `tree(seed)`."""
    plain = config.build(tree(0), 10).gathered
    return jax.jit(plain.update)(tree(seed), plain.init(tree(0)), tree(0))[0]


def layout_of(**sizes: int):
    """The layout of a mesh of as many of the devices as it takes."""
    return standard_layout(make_mesh(MeshConfig(**{"data": 1, **sizes}), jax.devices()[: prod(sizes.values())]))


def compiled(optimizer: Optimizer, layout: Layout):
    """The gathered part, compiled for updates and parameters under `params`, and its arguments."""
    parameters, updates = (jax.device_put(tree(seed), layout.shardings(tree(seed), layout.params)) for seed in (0, 1))
    shardings = layout.shardings(updates, layout.params)
    step = jax.jit(lambda u, s, p: optimizer.gathered.update(u, s, p)[0], out_shardings=shardings)
    arguments = (updates, optimizer.gathered.init(parameters), parameters)
    return step.lower(*arguments).compile(), arguments


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("sizes", [{"replica": 2, "data": 2, "model": 2}, {"replica": 1, "data": 8}])
def test_on_a_mesh_the_updates_are_those_of_one_device(sizes, heads):
    layout, config = layout_of(**sizes), replace(CONFIG, heads=heads)
    step, arguments = compiled(config.build(tree(0), 10, layout), layout)
    for name, update in step(*arguments).items():
        np.testing.assert_allclose(update.array, expected(1, config)[name].array, rtol=1e-5, atol=1e-7, err_msg=name)
    assert set(COLLECTIVE.findall(step.as_text())) == {"all-to-all"}, "and these run over data and model only"


@pytest.mark.parametrize("sizes", [{"replica": 2, "data": 2, "model": 2}, {}])
def test_flops_by_hand(sizes):
    """On 2 x 2 devices of a replica, which divide 6 square matrices and 4 oblong ones; on one device all of them."""
    layout = layout_of(**sizes)
    square, oblong = 4 * 16**2 * 16 + 2 * 16**3, 4 * 16**2 * 32 + 2 * 16**3
    on_device = 3 * (2 * square + oblong) if sizes else 3 * (3 * (2 * square + oblong) + oblong)
    update = CONFIG.build(tree(0), 10, layout).gathered
    traced = jax.make_jaxpr(lambda u, p: update.update(u, update.init(p), p)[0])(tree(1), tree(0))
    assert work_of(traced).flops == on_device * layout.mesh.size


@pytest.mark.parametrize(
    "sizes",
    [
        {"replica": 2, "data": 2, "model": 2},
        {"stage": 2, "data": 2, "model": 2},
        {"replica": 2, "data": 2},
        {"data": 8},
        {"model": 4},
        {"replica": 2},
    ],
)
def test_it_sends_each_matrix_there_and_back(sizes):
    layout = layout_of(**sizes)
    step, _ = compiled(replace(CONFIG, iterations=1).build(tree(0), 10, layout), layout)
    found = Counter((each.kind, each.axes, each.bytes) for each in audit(step, layout.mesh).collectives)
    crossed = [axis for axis in ("stage", "data", "model") if sizes.get(axis, 1) > 1]
    assert {kind for kind, *_ in found} == ({"all-to-all"} if crossed else set())
    assert {axis for _, axes, _ in found for axis in axes} == set(crossed), "nothing crosses replica"
    assert all(count == 4 for count in Counter(axes for _, axes, _ in found.elements()).values()), "of two shapes"
    devices = layout.mesh.size // layout.replicas
    for axes in {axes for _, axes, _ in found}:
        # zero matrices fill up the six and the four of a stack
        sent = sum(size * count for (_, each, size), count in found.items() if each == axes)
        assert sent == 2 * 4 * (16 * 16 * -(-6 // devices) + 16 * 32 * -(-4 // devices))


def test_without_the_layout_the_partitioner_spreads_the_products_over_the_mesh():
    layout = layout_of(replica=2, data=2, model=2)
    step, _ = compiled(CONFIG.build(tree(0), 10), layout)
    assert "all-reduce" in COLLECTIVE.findall(step.as_text())


def test_under_a_vmap_over_replica_every_replica_has_its_own():
    layout = layout_of(replica=2, data=2, model=2)
    both = jax.tree.map(lambda *pair: np.stack(pair), tree(1), tree(2))
    both = {name: hax.named(leaf.array, (layout.Replica, *AXES[name])) for name, leaf in both.items()}
    optimizer = CONFIG.build(tree(0), 10, layout).gathered
    parameters = tree(0)

    def update(updates):
        return optimizer.update(updates, optimizer.init(parameters), parameters)[0]

    with jax.set_mesh(layout.mesh), hax.axis_mapping(dict(layout.compute)):
        found = jax.jit(lambda updates: hax.vmap(update, layout.Replica)(updates))(both)
    for replica, seed in enumerate((1, 2)):
        for name, leaf in found.items():
            np.testing.assert_allclose(
                leaf.array[replica], expected(seed)[name].array, rtol=1e-5, atol=1e-7, err_msg=name
            )
