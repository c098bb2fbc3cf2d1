"""The replicas' cosine similarity against every pair's, taken from the whole pseudo-gradients in NumPy."""

import dataclasses

import haliax as hax
import jax
import numpy as np
import pytest
from haliax import Axis

from gregale.axes.layout import MeshConfig, make_mesh, standard_layout
from gregale.methods.method import PseudoGradientStats, cosine, products

Layers, Embed, Other = Axis("layers", 3), Axis("embed", 512), Axis("other", 5)
AXES = {"split": (Layers, Embed), "also": (Embed, Other), "whole": (Other,)}
SPLIT = {"replica": ["replica"], "island": ["replica", "island"]}


def of_pairs(own: np.ndarray, weights: np.ndarray) -> float:
    """Mean over pairs of the cosines of [replica, coordinate], weighted by both replicas' weights and lengths."""
    total = norms = 0.0
    for j, one in enumerate(own):
        for k, other in enumerate(own):
            if j != k:
                length = np.linalg.norm(one) * np.linalg.norm(other)
                total += weights[j] * weights[k] * length * (one @ other / length)
                norms += weights[j] * weights[k] * length
    return total / norms


def pseudo_gradients(replicas: int, seed: int = 0, common: float = 1.0) -> dict[str, np.ndarray]:
    """[replica, ...] each: something in common and something of each replica's own, of different lengths."""
    random = np.random.default_rng(seed)

    def one(shape):
        own = common * random.normal(size=shape) + random.normal(size=(replicas, *shape))
        return own * np.linspace(1.0, 1.5, replicas).reshape(-1, *[1] * len(shape))

    return {name: one([axis.size for axis in axes]) for name, axes in AXES.items()}


def measured(
    gradients: dict[str, np.ndarray], weights: np.ndarray, mesh: MeshConfig, per_device: int = 1
) -> PseudoGradientStats:
    """What the program measures, on the mesh, around some theta."""
    axis = "island" if mesh.island > 1 else "replica"
    layout = standard_layout(make_mesh(mesh, jax.devices()[: mesh.device_count]))
    finest = {**layout.opt_state, "embed": ("data", *SPLIT[axis])}
    layout = dataclasses.replace(layout, opt_state=finest, replicas_per_device=per_device)
    random = np.random.default_rng(9)
    theta = {name: random.normal(size=[each.size for each in AXES[name]]) for name in gradients}
    own = {name: theta[name] - gradients[name] for name in gradients}
    mean = {name: np.einsum("k,k...->...", weights / weights.sum(), each) for name, each in gradients.items()}

    def placed(values, mapping, *leading):
        tree = {name: hax.named(value.astype(np.float32), (*leading, *AXES[name])) for name, value in values.items()}
        return jax.device_put(tree, layout.shardings(tree, mapping))

    own = placed(own, layout.params, Axis(axis, len(weights)))
    theta, mean = placed(theta, layout.opt_state), placed(mean, layout.opt_state)
    measure = jax.jit(lambda own, theta, mean: products(own, theta, mean, layout, axis))
    square, product = measure(own, theta, mean)
    return PseudoGradientStats(np.float32(0), weights, square, product)


def flat(gradients: dict[str, np.ndarray], replicas: int) -> np.ndarray:
    return np.concatenate([each.reshape(replicas, -1) for each in gradients.values()], axis=1)


MESHES = {
    2: MeshConfig(replica=2, data=2, model=2),
    4: MeshConfig(replica=4, data=2),
    "islands": MeshConfig(island=2, replica=2, data=2),
}


@pytest.mark.parametrize(("mesh", "common"), [(2, 0.0), (4, 1.0), ("islands", 1.0)])
def test_it_is_the_pairs_mean(mesh, common):
    """An estimate from a share of the coordinates: good to the noise of some 500 numbers and more."""
    replicas = 2 if mesh == "islands" else mesh
    weights = np.arange(1.0, replicas + 1)
    gradients = pseudo_gradients(replicas, common=common)
    found = cosine(measured(gradients, weights, MESHES[mesh]))
    expected = of_pairs(flat(gradients, replicas), weights)
    assert found == pytest.approx(expected, abs=0.04)
    assert (expected > 0.4) == (common > 0)


def test_it_is_exact_where_nothing_is_split():
    weights, gradients = np.arange(1.0, 5), {"whole": pseudo_gradients(4)["whole"]}
    found = cosine(measured(gradients, weights, MESHES[4]))
    assert found == pytest.approx(of_pairs(gradients["whole"], weights), rel=1e-5)


@pytest.mark.parametrize("per_device", [1, 2])
def test_every_replica_is_measured_on_its_share(per_device):
    """Each number against the coordinates that the replica's devices hold of theta."""
    mesh, replicas = MESHES[4], 4
    layout = standard_layout(make_mesh(mesh))
    gradients, weights = pseudo_gradients(replicas), np.arange(1.0, replicas + 1)
    found = measured(gradients, weights, dataclasses.replace(mesh, replica=4 // per_device), per_device)
    square, product = np.zeros(replicas), np.zeros(replicas)
    for name, each in gradients.items():
        shape = each.shape[1:]
        mean = np.einsum("k,k...->...", weights / weights.sum(), each)
        places = layout.sharding(AXES[name], layout.opt_state).devices_indices_map(shape)
        for k in range(replicas):
            held = np.zeros(shape, bool)
            for device in layout.mesh.devices[0, k].flat:
                held[places[device]] = True
            square[k] += (each[k] ** 2)[held].sum() * each[k].size / held.sum()
            product[k] += (each[k] * mean)[held].sum() * each[k].size / held.sum()
    np.testing.assert_allclose(found.square, square, rtol=1e-5)
    np.testing.assert_allclose(found.product, product, rtol=1e-4)


@pytest.mark.quick
def test_replicas_that_moved_alike_and_against_one_another():
    alike = np.full((3, 4), 2.0)
    for own, expected in ((alike, 1.0), (np.stack([alike[0], -alike[0]]), -1.0)):
        weight = np.ones(len(own))
        product = own @ own.mean(0)
        assert cosine(PseudoGradientStats(0.0, weight, (own**2).sum(1), product)) == pytest.approx(expected)


@pytest.mark.quick
def test_a_replica_that_is_left_out_does_not_count():
    own, weight = pseudo_gradients(4)["whole"], np.array([1.0, 0.0, 3.0, 2.0])
    product = own @ (weight @ own / weight.sum())
    found = cosine(PseudoGradientStats(0.0, weight, (own**2).sum(1), product))
    assert found == pytest.approx(of_pairs(own[weight > 0], weight[weight > 0]))


@pytest.mark.quick
def test_without_two_that_moved_there_is_none():
    for name, *sums in (
        ("one replica", [1.0], [4.0], [4.0]),
        ("none moved", [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]),
        ("none took part", [0.0, 0.0], [1.0, 1.0], [np.nan, np.nan]),
        ("one took part", [0.0, 2.0], [1.0, 1.0], [0.5, 1.0]),
        ("overflow", [1.0, 1.0], [np.inf, 1.0], [1.0, 1.0]),
        ("nan", [1.0, 1.0], [np.nan, 1.0], [1.0, 1.0]),
    ):
        assert cosine(PseudoGradientStats(np.float32(0), *(np.array(each, np.float32) for each in sums))) is None, name
