"""Measure the agreement of replicas: the cosine similarity of their pseudo-gradients, without sending any of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from jax.sharding import PartitionSpec

from gregale.axes.layout import Layout, Tree, is_named
from gregale.communication.reduce import further_splits, own_part


class PseudoGradient(NamedTuple):
    """Measurements of a fragment's pseudo-gradient g = sum_k p_k g_k, with g_k = theta - theta_k, when it is sent.

    Each replica k has only its shard S_k of theta's coordinates, 1 / R of them. For S_k it has g_k and g, so that these
    sums need no transfer over the axis. An array that is not split over the axis is in every shard.
    """

    norm: Any  # float32 scalar: |g|
    weight: Any  # float32 [replica]: w_k, 0 for a replica that is left out; p_k = w_k / sum_j w_j
    square: Any  # float32 [replica]: |g_k|^2 on S_k, in units of all coordinates
    product: Any  # float32 [replica]: <g_k, g> on S_k, likewise


def products(own: Tree, theta: Tree, gradient: Tree, layout: Layout, axis: str) -> tuple[jax.Array, jax.Array]:
    """Return `square` and `product` of a `PseudoGradient`; nothing crosses `axis`.

    - `own`: theta_k, with a leading [replica]; under `params`
    - `theta`, `gradient`: theta and g; under `opt_state`
    - `axis`: the name of the leading axis
    """

    def one(theta, own, gradient):
        if not isinstance(theta, NamedArray):
            return _products(own, theta, gradient, (), layout, axis)
        names = tuple(each.name for each in theta.axes)
        own, gradient = own.rearrange((axis, *names)), gradient.rearrange(names)
        return _products(own.array, theta.array, gradient.array, names, layout, axis)

    found = jax.tree.map(one, theta, own, gradient, is_leaf=is_named)
    squares, crossed = zip(*jax.tree.leaves(found, is_leaf=lambda node: isinstance(node, tuple)), strict=True)
    return sum(squares), sum(crossed)  # type: ignore[return-value]


def _products(own, theta, gradient, names: tuple[str, ...], layout: Layout, axis: str) -> tuple[jax.Array, jax.Array]:
    """Turn [axis, *names] under `params` and twice [*names] under `opt_state` into [axis] and [axis]."""
    cuts = further_splits(names, layout)
    split = layout.mesh_axes(names, layout.opt_state)
    inside = tuple(mesh_axis for mesh_axis in split if mesh_axis != axis)
    share = layout.mesh.shape[axis] if axis in split else 1

    def multiply(own: jax.Array, theta: jax.Array, gradient: jax.Array):
        own = own[0]
        for dimension, mesh_axes in enumerate(cuts):
            for mesh_axis in mesh_axes:
                own = own_part(own, dimension, mesh_axis)
        mine = theta - own
        sums = share * jnp.stack([jnp.sum(mine * mine), jnp.sum(mine * gradient)])
        square, product = jax.lax.psum(sums, inside) if inside else sums
        return square[None], product[None]

    before, after = (layout.spec(names, mapping) for mapping in (layout.params, layout.opt_state))
    replica = PartitionSpec(axis)
    mapped = layout.shard_map(multiply, (PartitionSpec(axis, *before), after, after), (replica, replica))
    return mapped(own, theta, gradient)


def cosine(measured: PseudoGradient) -> float | None:
    """Return the mean cosine similarity of the replicas' pseudo-gradients; None if fewer than two of them moved.

    It is the mean over all pairs, weighted by p_k and lengths (the first form). It needs only sums of single replicas
    (the second):

        cosine = sum_{j != k} p_j p_k <g_j, g_k> / sum_{j != k} p_j p_k |g_j| |g_k|
               = sum_k p_k (<g_k, g> - p_k |g_k|^2) / ((sum_k p_k |g_k|)^2 - sum_k p_k^2 |g_k|^2)

    where the values of k are those on S_k. So for arrays that are split over the replicas it is an estimate, from 1 / R
    of each replica's coordinates (the inner product is exact for two replicas); otherwise it is exact.
    """
    weight, square, product = (np.asarray(each, np.float64) for each in measured[1:])
    if not (weight.sum() > 0 and np.isfinite([square, product]).all()):
        return None
    share, length = weight / weight.sum(), np.sqrt(square)
    lengths = np.sum(share * length) ** 2 - np.sum((share * length) ** 2)
    if lengths <= 1e-12 * np.sum(square):  # no pair, up to the rounding of the difference
        return None
    return float(np.sum(share * (product - share * square)) / lengths)
