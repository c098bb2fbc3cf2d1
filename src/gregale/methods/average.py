"""The average of the parameters over the steps of a run, beside the parameters that train."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gregale.axes.layout import Tree
from gregale.settings import DECAY, Settings, setting, whole


@dataclass(frozen=True)
class AverageConfig(Settings):
    """An exponential moving average of the parameters, with DiLoCo of the outer ones (Polyak averaging, EMA).

    With theta_n after the n-th multiple of `every` steps, and theta_0 with which it begins:

        average_0 = theta_0;  average_n = average_(n-1) + (1 - decay) / (1 - decay^n) (theta_n - average_(n-1))

    It is Adam's moving average with its correction of the start: average_1 is theta_1, so that nothing of the random
    parameters stays. It is sharded as the optimizer's state, so that nothing is sent for it.
    """

    decay: float = setting(0.999, "what is kept at each addition", range=DECAY, aliases=("ema_decay",), by_topic=True)
    every: int = setting(1, "steps between additions", range=whole(1), aliases=("ema_every", "interval"), by_topic=True)
    evaluate: bool = setting(
        False,
        "evaluations, samples, exports and start_from read the average in place of the parameters",
        aliases=("use_ema", "ema_eval"),
        by_topic=True,
    )


class Average(NamedTuple):
    """The state of an average."""

    count: Any  # int32 []: additions so far
    parameters: Tree  # float32, in the structure of the parameters, under `opt_state`

    @staticmethod
    def begin(parameters: Tree) -> "Average":
        """Return the average before the first addition: the parameters themselves, under `opt_state`."""
        return Average(jnp.zeros((), jnp.int32), jax.tree.map(lambda leaf: leaf.astype(jnp.float32), parameters))

    def with_added(self, parameters: Tree, decay: float) -> "Average":
        """Return the average after one more addition."""
        count = self.count + 1
        kept = jnp.float32(decay)
        share = (1 - kept) / (1 - kept**count)

        def one(average: jax.Array, theta: jax.Array) -> jax.Array:
            return average + share * (theta.astype(jnp.float32) - average)

        return Average(count, jax.tree.map(one, self.parameters, parameters))
