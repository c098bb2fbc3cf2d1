"""Steps that are left out because their loss or gradient norm is far above those before."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gregale.settings import Settings, above, setting, whole


@dataclass(frozen=True)
class SpikesConfig(Settings):
    """A step whose loss or gradient norm is above mean + sigma * standard deviation of the window changes nothing.

    The window has the finite values of the last steps, spikes too: after a lasting rise steps count again.
    """

    window: int = setting(128, "steps", range=whole(2, 100_000), aliases=("rolling_interval_length",), by_topic=True)
    sigma: float = setting(6.0, "standard deviations", range=above(0), aliases=("sigma_factor",), by_topic=True)


class Limits(NamedTuple):
    """The largest values of a step that is no spike, float32, of each replica that makes its own steps."""

    loss: Any
    norm: Any


class SpikeWindow(NamedTuple):
    """The values of the last steps with finite ones, and the number of spikes, of each replica that decides itself."""

    losses: Any  # float32 [*replica_axes, window]
    norms: Any  # float32 [*replica_axes, window]
    seen: Any  # int32 [*replica_axes]: values so far
    spikes: Any  # int32 [*replica_axes]

    @staticmethod
    def empty(config: SpikesConfig, axes: tuple[int, ...]) -> "SpikeWindow":
        values, counts = jnp.zeros((*axes, config.window), jnp.float32), jnp.zeros(axes, jnp.int32)
        return SpikeWindow(values, values, counts, counts)

    def limits(self, sigma: float) -> Limits:
        """Return the limits of the next step; infinite ones until the window is full."""
        full = self.seen >= self.losses.shape[-1]

        def limit(values: jax.Array) -> jax.Array:
            return jnp.where(full, values.mean(-1) + sigma * values.std(-1), jnp.inf)

        return Limits(limit(self.losses), limit(self.norms))

    def after(self, loss: jax.Array, norm: jax.Array, finite: jax.Array, spike: jax.Array) -> "SpikeWindow":
        """Return the window after a step."""
        size = self.losses.shape[-1]
        here = (jnp.arange(size) == (self.seen % size)[..., None]) & finite[..., None]

        def put(values: jax.Array, value: jax.Array) -> jax.Array:
            return jnp.where(here, value[..., None], values)

        losses, norms = put(self.losses, loss), put(self.norms, norm)
        return SpikeWindow(losses, norms, self.seen + finite, self.spikes + spike)
