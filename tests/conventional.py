"""The usual data-parallel step, without a replica axis: what PSDP is measured against.

The batch is split over (replica, data), and every microbatch's gradient is added to one buffer that is sharded like
the parameters. So each gradient has to be summed over `replica` as soon as it is made, once a microbatch.
"""

from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import Axis, NamedArray

from gregale.axes.layout import BATCH, Layout, is_named

Tree = Any
MICROBATCH = "microbatch"


def conventional_step(
    loss: Callable[[Tree, Tree], tuple[jax.Array, jax.Array]],
    optimizer: optax.GradientTransformation,
    layout: Layout,
    microbatches: int,
) -> Callable[[Tree, Tree, Tree], tuple[Tree, Tree, jax.Array]]:
    """`step(parameters, optimizer_state, batch) -> (parameters, optimizer_state, loss)`, all under `params`.

    Arguments:
    - `loss`: loss(parameters, batch) -> (sum of losses, sum of weights), with `batch` over (replica, data)
    - `optimizer`: its state lies under `params` too: every replica holds a copy
    """

    def step(parameters: Tree, state: Tree, batch: Tree):
        def add(sums: tuple, microbatch: Tree) -> tuple:
            (value, weight), gradients = jax.value_and_grad(loss, has_aux=True)(parameters, microbatch)
            gradients = layout.constrain(gradients, layout.params)
            gradients, *scalars = jax.tree.map(jnp.add, sums, (gradients, value, weight))
            return layout.constrain(gradients, layout.params), *scalars

        zeros = layout.constrain(jax.tree.map(jnp.zeros_like, parameters), layout.params)
        rows = split(batch, layout, microbatches)
        start = (zeros, jnp.float32(0), jnp.float32(0))
        gradients, total, weight = hax.fold(add, Axis(MICROBATCH, microbatches))(start, rows)
        gradients = jax.tree.map(lambda gradient: gradient / weight, gradients)
        updates, state = optimizer.update(gradients, state, parameters)
        parameters = layout.constrain(optax.apply_updates(parameters, updates), layout.params)
        return parameters, layout.constrain(state, layout.params), total / weight

    return step


def split(batch: Tree, layout: Layout, microbatches: int) -> Tree:
    """Every device's rows cut into microbatches: [batch, ...] -> [microbatch, batch / microbatches, ...]."""
    shards = layout.mesh.shape["replica"] * layout.mesh.shape["data"]

    def one(leaf: NamedArray) -> NamedArray:
        leaf = leaf.rearrange((BATCH, ...))
        size, rest = leaf.axes[0].size, leaf.axes[1:]
        cut = leaf.array.reshape(shards, microbatches, size // shards // microbatches, *leaf.array.shape[1:])
        cut = cut.swapaxes(0, 1).reshape(microbatches, size // microbatches, *leaf.array.shape[1:])
        axes = (Axis(MICROBATCH, microbatches), Axis(BATCH, size // microbatches), *rest)
        return layout.constrain(hax.named(cut, axes), layout.compute)

    return jax.tree.map(one, batch, is_leaf=is_named)
