"""One island of DiLoCo or Streaming DiLoCo: its own mesh makes PSDP steps, a network joins it with other islands.

The same arithmetic as `Diloco` in one mesh, but that the average is taken outside of the compiled programs:

    island = config.sync.island(parts)               # a Method: stepper, loop, evaluation, checkpoints take it as such
    host = HostOuter(island)                         # theta and the outer optimizer, in this host's memory
    host.begin(state.psdp.parameters)

    fragment = island.fragment(index)
    messages, error = island.depart(state, host.theta(index), fragment)           # after step t
    down = on_host(messages)                                                      # waits for the device
    reduced = host.reducer(index).reduce(down, weights, link, own_error)          # in a thread of its own
    prepared = host.prepare(index, reduced.gradient)                              # nothing has changed yet
    host.commit(prepared, version)
    state = island.arrive(state, host.theta(index), fragment, keep, error)        # after step t + tau
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from gregale.audit.step import StepShape
from gregale.axes.layout import ISLAND, Layout, is_parameter
from gregale.codecs.config import ReduceConfig
from gregale.codecs.feedback import Stored, load
from gregale.communication.feedback import ErrorState, arrays_of, error_shardings, init_error, next_step, updated
from gregale.communication.legs import encoded, remember
from gregale.communication.pieces import Leaf, leaves_of
from gregale.communication.reduce import give_back
from gregale.communication.rows import Rows, rows_of
from gregale.methods.fragments import Fragment, errors_per_fragment
from gregale.methods.method import Actions, PsdpState, StepMetrics
from gregale.methods.outer import pseudo_gradient
from gregale.methods.psdp import Psdp
from gregale.methods.round import mixed_with
from gregale.methods.schedule import Schedule
from gregale.methods.traffic import PsdpTraffic

Tree = Any


class IslandState(NamedTuple):
    """What an island carries from step to step on its devices; theta is not among it."""

    psdp: PsdpState  # of its own mesh
    error: ErrorState | None  # what the first leg has not sent yet: [island = 1, *axes] under `opt_state`


@dataclass(frozen=True)
class Island:
    """One island as a method: PSDP steps inside, and the two programs at the boundary to the network.

        depart: d = theta_f - theta_k,f        message = encode(d + e)        on each device, of its own shard
        arrive: theta_k,f = keep theta_k,f + (1 - keep) theta_f

    Messages are unweighted: the weights w_k are known only when all members are, and enter in `NetworkReducer`.

    - `inner`: the PSDP step on the island's own mesh, whose axis `island` is 1
    - `outer`: the outer optimizer, of optax; element-wise
    - `schedule`: H, P, tau, and which layers a fragment has
    - `mixing`: alpha, what an island keeps of its own when a fragment that it contributed to arrives
    - `reduce`: the codecs of what crosses the network, and the feedback
    """

    inner: Psdp
    outer: optax.GradientTransformation
    schedule: Schedule
    mixing: float = 0.0
    reduce: ReduceConfig = field(default=ReduceConfig())

    name: ClassVar[str] = "island"
    shown: ClassVar[tuple[str, ...]] = ()

    # A fragment's way to the network and back.

    def fragment(self, index: int) -> Fragment:
        """The fragment with this number, as the argument of `depart` and `arrive`."""
        fragment = Fragment.at(self.schedule, index, 0)
        assert fragment is not None
        return fragment

    def depart(self, state: IslandState, theta: Tree, fragment: Fragment) -> tuple[dict[str, jax.Array], ErrorState]:
        """What this island sends of a fragment, and its error if the round is committed; the state stays as it is.

        Returns the messages by the path of their array, uint8 [shards of each axis ..., rows, bytes of a row]: a
        device has those of its own shard under `opt_state`, and encoded them. See `shards.on_host`.

        - `theta`: theta_f as `HostOuter.theta` brings it up
        """
        return self._depart(state.psdp.parameters, state.error, theta, fragment)

    def arrive(
        self, state: IslandState, theta: Tree, fragment: Fragment, keep: float, error: ErrorState | None = None
    ) -> IslandState:
        """The state with theta_f mixed in; the state that comes in is donated.

        - `theta`: theta_f after its outer step, as `HostOuter.theta` brings it up
        - `keep`: what is kept of the island's own: `mixing`; 1 if it did not contribute, 0 if it was healed
        - `error`: of the `depart` whose round was committed; None: the error stays
        """
        raise NotImplementedError
