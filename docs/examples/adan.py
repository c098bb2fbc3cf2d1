"""An optimizer: Adan, Nesterov momentum on the gradient and on its change (Xie et al., arXiv 2208.06677)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gregale.optim import OptimizerConfig
from gregale.settings import DECAY, above, setting


class AdanState(NamedTuple):
    gradient: Any  # of the step before
    first: Any  # averages of gradients, of their changes, and of squares
    change: Any
    square: Any
    count: jax.Array


@OptimizerConfig.register_subclass("adan")
@dataclass(frozen=True)
class AdanConfig(OptimizerConfig):
    """Adan; element by element, so that it runs on shards."""

    betas: tuple[float, float, float] = setting((0.98, 0.92, 0.99), "decays of the three averages", range=DECAY)
    epsilon: float = setting(1e-8, "added to the root of the square", range=above(0))

    def direction(self) -> optax.GradientTransformation:
        b1, b2, b3 = self.betas

        def init(params) -> AdanState:
            zeros = jax.tree.map(jnp.zeros_like, params)
            return AdanState(zeros, zeros, zeros, zeros, jnp.zeros((), jnp.int32))

        def average(old, new, beta):
            return jax.tree.map(lambda old, new: beta * old + (1 - beta) * new, old, new)

        def update(updates, state: Any, params=None):
            change = jax.tree.map(lambda new, old: jnp.where(state.count > 0, new - old, 0), updates, state.gradient)
            ahead = jax.tree.map(lambda new, difference: (new + b2 * difference) ** 2, updates, change)
            after = AdanState(
                updates,
                average(state.first, updates, b1),
                average(state.change, change, b2),
                average(state.square, ahead, b3),
                state.count + 1,
            )
            c1, c2, c3 = (1 - beta**after.count for beta in self.betas)

            def one(m, v, n):
                return (m / c1 + b2 * v / c2) / (jnp.sqrt(n / c3) + self.epsilon)

            return jax.tree.map(one, after.first, after.change, after.square), after

        return optax.GradientTransformation(init, update)
