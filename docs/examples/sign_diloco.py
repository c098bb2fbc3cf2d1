"""A synchronisation method: DiLoCo on the signs of differences (after signSGD, arXiv 1802.04434).

With theta the outer parameters and theta_k those of replica k, every H steps:
    v = momentum * v + mean_k sign(theta - theta_k);  theta = theta_k = theta - rate * v
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gregale.axes.layout import Layout
from gregale.methods.config import MixingConfig, SyncConfig
from gregale.methods.diloco import Mixing
from gregale.methods.psdp import Psdp
from gregale.settings import DECAY, above, setting, whole


@dataclass(frozen=True)
class SignDiloco(Mixing):
    inner: Psdp  # the step of one replica
    layout: Layout  # the whole mesh
    period: int
    rate: float
    momentum: float
    name = "sign_diloco"

    def due(self, step: int) -> Any:
        return () if step % self.period == 0 else None

    def begin(self, parameters: Any) -> Any:
        return parameters, jax.tree.map(jnp.zeros_like, parameters)  # each replica has a copy: nothing more is sent

    def mix(self, parameters: Any, own: Any, due: Any) -> tuple[Any, Any]:
        theta, velocity = own
        g = self.replicas.average(jax.tree.map(lambda theta, k: jnp.sign(theta - k), theta, parameters))
        velocity = jax.tree.map(lambda v, g: self.momentum * v + g, velocity, self.replicas.copies(g))
        theta = jax.tree.map(lambda theta, v: theta - self.rate * v, theta, velocity)
        return theta, (theta, velocity)

    def joined(self, parameters: Any, own: Any) -> Any:
        return self.replicas.one(own[0], 0)

    def bytes_sent(self, step: int) -> int:
        n = self.replicas.SyncAxis.size
        return step // self.period * 2 * (n - 1) * self.parameter_bytes // n


@SyncConfig.register_subclass("sign_diloco")
@dataclass(frozen=True)
class SignDilocoConfig(MixingConfig):
    """Replicas train apart, and an outer optimizer joins the signs of their differences."""

    period: int = setting(30, "steps between two outer steps", range=whole(1))
    rate: float = setting(0.001, "outer learning rate", range=above(0))
    momentum: float = setting(0.9, "of the outer optimizer", range=DECAY)

    def mixing_method(self, inner: Psdp, layout: Layout) -> SignDiloco:
        return SignDiloco(inner, layout, self.period, self.rate, self.momentum)
