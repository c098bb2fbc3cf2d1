"""A synchronisation method: one-peer gossip on the exponential graph (Ying et al., arXiv 2110.13363).

After a step each of n replicas averages its parameters with those of one other:

    theta_k = (theta_k + theta_(k - 2^j)) / 2,  j = t mod ceil(log2 n),  k in a ring

It waits for one peer, not for all, and sends the parameters once; PSDP sends gradients and updates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import haliax as hax
import jax
import numpy as np

from gregale.axes.layout import Layout, is_named
from gregale.methods.config import MixingConfig, SyncConfig
from gregale.methods.diloco import Mixing
from gregale.methods.psdp import Psdp
from gregale.settings import setting, whole


@dataclass(frozen=True)
class Gossip(Mixing):
    inner: Psdp  # the step of one replica
    layout: Layout  # the whole mesh
    period: int = 1

    name: ClassVar[str] = "gossip"

    def due(self, step: int) -> Any:
        turn, rest = divmod(step, self.period)
        return None if rest or not self.hops() else np.int32(turn % len(self.hops()))

    def mix(self, parameters: Any, own: Any, due: Any) -> tuple[Any, Any]:
        def averaged(hop: int) -> Any:
            return jax.tree.map(lambda x: (x + hax.roll(x, hop, self.axis)) / 2, parameters, is_leaf=is_named)

        return jax.lax.switch(due, [partial(averaged, hop) for hop in self.hops()]), own

    def hops(self) -> list[int]:
        return [2**j for j in range((self.replicas.SyncAxis.size - 1).bit_length())]

    def bytes_sent(self, step: int) -> int:
        return step // self.period * self.parameter_bytes if self.hops() else 0


@SyncConfig.register_subclass("gossip")
@dataclass(frozen=True)
class GossipConfig(MixingConfig):
    """Each replica averages its parameters with those of one other."""

    period: int = setting(1, "steps between two averages", range=whole(1))

    def mixing_method(self, inner: Psdp, layout: Layout) -> Gossip:
        return Gossip(inner, layout, self.period)
