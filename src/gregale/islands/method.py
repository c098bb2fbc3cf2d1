"""One island of DiLoCo or Streaming DiLoCo: its own mesh runs PSDP steps, and a network joins it with other islands.

The arithmetic is that of `Diloco` in one mesh, but the average is computed outside of the compiled programs:

    _, island = methods_of_island(sync, parts)       # a Method: stepper, loop, evaluation, checkpoints take it as such
    host = HostOuter(island)                         # theta and the outer optimizer, in this host's memory
    host.begin(state.psdp.parameters)

    fragment = island.fragment(index)
    messages, error = island.depart(state, host.theta(index), fragment)           # after step t
    norm = island.norm(state, host.theta(index), fragment)                        # tells whether this island diverges
    down = on_host(messages)                                                      # waits for the device
    reduced = host.reducer(index).reduce(down, weights, link, host.error(index, group))  # in a thread of its own
    prepared = host.prepare(index, reduced, group)                                # nothing has changed yet
    host.commit(prepared, version)
    state = island.arrive(state, host.theta(index), fragment, keep, error)        # after step t + tau
    state = island.rebase(state, before, host.theta(index), fragment)             # if it did not contribute
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from gregale.axes.layout import ISLAND, Layout, Tree, with_shardings
from gregale.axes.parameters import trainable
from gregale.codecs.codec import QuantisedArray, ReduceConfig, load
from gregale.communication.quantised import (
    ErrorState,
    RowLayout,
    arrays_of,
    encoded,
    error_shardings,
    init_error,
    next_step,
    remember,
    rows_of,
    updated,
)
from gregale.communication.reduce import ShardedLeaf, all_gather_params, leaves_of
from gregale.errors import UserError
from gregale.methods.config import DilocoConfig, MethodContext, Methods, SyncConfig
from gregale.methods.diloco import mixed_with, pseudo_gradient
from gregale.methods.method import Inspected, Limits, Method, Probe, PsdpState, SpikesConfig, StepMetrics
from gregale.methods.psdp import Psdp
from gregale.methods.schedule import Fragment, Schedule, Traffic, errors_per_fragment
from gregale.model.config import CompilerOptions


class IslandState(NamedTuple):
    """The state of an island on its devices between steps; it does not include theta."""

    psdp: PsdpState  # of its own mesh
    error: ErrorState | None  # the unsent rest of the first phase: [island = 1, *axes] under `opt_state`


@dataclass(frozen=True)
class Island(Method):
    """One island as a method: PSDP steps inside, and the two programs at the boundary to the network.

        depart: d = theta_f - theta_k,f        message = encode(d + e)        on each device, of its own shard
        arrive: theta_k,f = keep theta_k,f + (1 - keep) theta_f
        rebase: theta_k,f = theta_k,f + theta_f' - theta_f      from theta_f to theta_f', of a round without this island

    Messages are unweighted: `NetworkReducer` applies the weights w_k, which are known only when all members are.

    - `inner`: the PSDP step on the island's own mesh, whose axis `island` is 1
    - `outer`: the outer optimizer, of optax; element-wise
    - `schedule`: H, P, tau, and which layers a fragment has
    - `mixing`: alpha, the weight of an island's own parameters when a fragment arrives to which it contributed
    - `reduce`: the codecs of messages over the network, and the feedback
    - `compiler_options`: for the programs on the island's devices
    """

    inner: Psdp
    outer: optax.GradientTransformation
    schedule: Schedule
    mixing: float = 0.0
    reduce: ReduceConfig = field(default=ReduceConfig())
    compiler_options: CompilerOptions | None = None

    name: ClassVar[str] = "island"
    shown: ClassVar[tuple[str, ...]] = ("round", "members")

    # Send a fragment to the network and apply its result.

    def fragment(self, index: int) -> Fragment:
        """Return the fragment with this number, as the argument of `depart` and `arrive`."""
        fragment = Fragment.at(self.schedule, index, 0)
        assert fragment is not None
        return fragment

    def depart(self, state: IslandState, theta: Tree, fragment: Fragment) -> tuple[dict[str, jax.Array], ErrorState]:
        """Return this island's messages of a fragment, and its error if the round is committed; the state does not
        change.

        The messages are by the path of their array, uint8 [shards of each axis ..., rows, bytes of a row]. A device
        encodes those of its own shard under `opt_state` and holds them. See `shards.on_host`.

        - `theta`: theta_f from `HostOuter.theta`
        """
        return self._depart(state.psdp.parameters, state.error, theta, fragment)

    def arrive(
        self, state: IslandState, theta: Tree, fragment: Fragment, keep: float, error: ErrorState | None = None
    ) -> IslandState:
        """Return the state with theta_f mixed in; the input state is donated.

        - `theta`: theta_f after its outer step, from `HostOuter.theta`
        - `keep`: the weight of the island's own parameters: `mixing`; 0 if it was healed
        - `error`: from the `depart` whose round was committed; None: the error stays
        """
        changed = self._arrive(state.psdp.parameters, state.error, theta, fragment, np.float32(keep), error)
        return IslandState(state.psdp._replace(parameters=changed[0]), changed[1])

    def rebase(self, state: IslandState, before: Tree, theta: Tree, fragment: Fragment) -> IslandState:
        """Return the state with theta_f replaced, and with the island's steps since it last contributed.

        They change the new theta_f as they changed the one before. The input state is donated.

        - `before`: the theta_f that the island's parameters are based on
        - `theta`: the new one, from `HostOuter.theta`
        """
        parameters = self._rebase(state.psdp.parameters, before, theta, fragment)
        return state._replace(psdp=state.psdp._replace(parameters=parameters))

    def norm(self, state: IslandState, theta: Tree, fragment: Fragment) -> jax.Array:
        """Return the root mean square of the pseudo-gradient theta_f - theta_k, the same on all devices.

        - `theta`: as for `depart`
        """
        return self._norm(state.psdp.parameters, theta, fragment)

    def compilations(self, state: IslandState) -> Iterator[Callable[[], Any]]:
        """Yield functions that compile the programs of `depart`, `norm`, `arrive` and `rebase`.

        - `state`: `jax.ShapeDtypeStruct`s with the shardings of the arrays
        """
        own = state.psdp.parameters
        for fragment in map(self.fragment, range(self.schedule.fragments)):
            theta = self.finest.abstract(jax.eval_shape(fragment.take, self.parameters), self.finest.params)
            sent = self._depart.lower(own, state.error, theta, fragment)
            yield sent.compile
            yield self._norm.lower(own, theta, fragment).compile
            error = jax.eval_shape(self._depart, own, state.error, theta, fragment)[1]
            error = with_shardings(error, sent.compile().output_shardings[1])
            yield self._arrive.lower(own, state.error, theta, fragment, np.float32(0), error).compile
            yield self._rebase.lower(own, theta, theta, fragment).compile

    def leaves(self, fragment: Fragment) -> list[ShardedLeaf]:
        """Return the arrays of a fragment's part of the parameters, as one device holds them under `opt_state`."""
        return leaves_of(jax.eval_shape(fragment.take, self.parameters), self.finest, ISLAND, replicated=False)

    def rows(self, leaf: ShardedLeaf) -> RowLayout:
        return rows_of(prod(leaf.shape), self.reduce, leaf.exact)

    @property
    def parameters(self) -> Tree:
        """Return the model's parameters, or their abstract forms."""
        return trainable(self.inner.model)

    @property
    def finest(self) -> Layout:
        """Return the layout in which `params` splits as finely as `opt_state`: nothing is stored or sent twice."""
        return replace(self.layout, params=self.layout.opt_state)

    @cached_property
    def _depart(self) -> Callable[..., Any]:
        return jax.jit(self.message, compiler_options=self.compiler_options)

    @cached_property
    def _norm(self) -> Callable[..., jax.Array]:
        return jax.jit(self.root_mean_square, compiler_options=self.compiler_options)

    @cached_property
    def _arrive(self) -> Callable[..., Any]:
        abstract = jax.eval_shape(self.init)
        places = self.shardings(abstract)
        where = places.psdp.parameters, places.error
        return jax.jit(self.mixed, donate_argnums=(0, 1), out_shardings=where, compiler_options=self.compiler_options)

    @cached_property
    def _rebase(self) -> Callable[..., Tree]:
        places = self.shardings(jax.eval_shape(self.init)).psdp.parameters
        return jax.jit(self.rebased, donate_argnums=0, out_shardings=places, compiler_options=self.compiler_options)

    def message(
        self, parameters: Tree, error: ErrorState, theta: Tree, fragment: Fragment
    ) -> tuple[dict[str, jax.Array], ErrorState]:
        """Compute `depart`, inside jit: the messages, and the fragment's part of the error."""
        finest, leaves = self.finest, self.leaves(fragment)
        own = finest.constrain(fragment.take(parameters), finest.params)
        error = next_step(fragment.take(error), self.reduce)
        kept = arrays_of(error.first, leaves)

        def on_device(theta: list, own: list, kept: dict[str, QuantisedArray]):
            differences = map(pseudo_gradient, theta, own)
            sent = [self._encoded(leaf, d, kept.get(leaf.path)) for leaf, d in zip(leaves, differences, strict=True)]
            messages = {leaf.path: message for leaf, (message, _) in zip(leaves, sent, strict=True)}
            return messages, {leaf.path: new for leaf, (_, new) in zip(leaves, sent, strict=True) if new is not None}

        shards = [leaf.params for leaf in leaves]
        errors = {leaf.path: PartitionSpec(None, *leaf.params) for leaf in leaves if leaf.path in kept}
        rows = {leaf.path: PartitionSpec(*leaf.params, None, None) for leaf in leaves}
        run = self.layout.shard_map(on_device, (shards, shards, errors), (rows, errors))
        messages, new = run(jax.tree.leaves(theta), jax.tree.leaves(own), kept)
        return messages, error._replace(first=updated(error.first, new))

    def root_mean_square(self, parameters: Tree, theta: Tree, fragment: Fragment) -> jax.Array:
        finest = self.finest
        own = finest.constrain(fragment.take(parameters), finest.params)
        differences = jax.tree.map(pseudo_gradient, jax.tree.leaves(theta), jax.tree.leaves(own))
        squares = [jnp.sum(jnp.square(each.astype(jnp.float32))) for each in differences]
        return jnp.sqrt(sum(squares, jnp.float32(0)) / sum(each.size for each in differences))

    def _encoded(
        self, leaf: ShardedLeaf, difference: jax.Array, kept: QuantisedArray | None
    ) -> tuple[jax.Array, QuantisedArray | None]:
        """Return a device's message of its shard, [1 of each axis ..., rows, bytes], and the next error, if any."""
        rows, beta = self.rows(leaf), self.reduce.beta
        values = {leaf.path: rows.to_rows(difference.astype(jnp.float32).reshape(-1))}
        errors = {} if kept is None else {leaf.path: rows.to_rows(load(kept).reshape(-1))}
        message, compensated, new = encoded(values, errors, rows.first_codec(self.reduce), beta)
        message = message.reshape(*(1 for _ in leaf.axes), *message.shape)
        if kept is None:
            return message, None
        finite = jnp.all(jnp.isfinite(compensated[leaf.path]))
        return message, remember({leaf.path: kept}, {leaf.path: rows.from_rows(new[leaf.path])}, finite)[leaf.path]

    def mixed(
        self,
        parameters: Tree,
        error: ErrorState,
        theta: Tree,
        fragment: Fragment,
        keep: jax.Array,
        new_error: ErrorState | None,
    ) -> tuple[Tree, ErrorState]:
        arrived = all_gather_params(theta, self.layout)
        part = mixed_with(fragment.take(parameters), arrived, keep)
        parameters = self.layout.constrain(fragment.put(parameters, part), self.layout.params)
        return parameters, error if new_error is None else fragment.put(error, new_error)

    def rebased(self, parameters: Tree, before: Tree, theta: Tree, fragment: Fragment) -> Tree:
        change = all_gather_params(jax.tree.map(jnp.subtract, theta, before), self.layout)
        part = jax.tree.map(jnp.add, fragment.take(parameters), change)
        return self.layout.constrain(fragment.put(parameters, part), self.layout.params)

    # The interface of `Method`; its steps are those of PSDP.

    @property
    def layout(self) -> Layout:
        return self.inner.layout

    def init(self, model: Tree | None = None) -> IslandState:
        return self.from_psdp(self.inner.init(model))

    def from_psdp(self, start: PsdpState, step: Any = 0) -> IslandState:
        return self.reset_error(IslandState(self.inner.from_psdp(start, step), None))

    def reset_error(self, state: IslandState) -> IslandState:
        error = init_error(state.psdp.parameters, self.finest, self.reduce, ISLAND)._replace(second={})
        return state._replace(error=errors_per_fragment(error, self.schedule.fragments))

    def without_error(self, state: IslandState) -> IslandState:
        return state._replace(error=None)

    def shardings(self, state: IslandState) -> IslandState:
        error = None if state.error is None else error_shardings(state.error, self.finest, ISLAND)
        return IslandState(self.inner.shardings(state.psdp), error)

    @property
    def spikes(self) -> SpikesConfig | None:
        return self.inner.spikes

    def step(self, state: IslandState, batch: Tree, limits: Limits | None = None) -> tuple[IslandState, StepMetrics]:
        psdp, metrics = self.inner.step(state.psdp, batch, limits)
        return state._replace(psdp=psdp), metrics

    def to_psdp(self, state: IslandState) -> PsdpState:
        return self.inner.to_psdp(state.psdp)

    def eval_model(self, state: IslandState) -> Tree:
        return self.inner.eval_model(state.psdp)

    def eval_subset(self, state: IslandState) -> IslandState:
        return IslandState(self.inner.eval_subset(state.psdp), None)

    def inspected(self, state: IslandState, batch: Tree, probe: Probe) -> Inspected:
        return self.inner.inspected(state.psdp, batch, probe)

    def bytes_sent(self, step: int) -> int:
        del step
        return 0

    def trees(self, state: IslandState) -> dict[str, Tree]:
        return self.inner.trees(state.psdp)

    def traffic(self) -> Traffic:
        return self.inner.traffic()


def as_island(method: Method) -> Island:
    assert isinstance(method, Island)
    return method


def rounds_of(sync: SyncConfig) -> DilocoConfig:
    """Return the settings of rounds; raise `UserError` for a method that joins no islands."""
    if (rounds := sync.outer_rounds) is None:
        raise UserError(
            f"sync.type is {sync.get_choice_name(type(sync))!r}, which joins no islands: steps would wait for the "
            f"network between them. Choose sync.type diloco or streaming_diloco; inside of an island "
            f"PSDP averages its replicas."
        )
    return rounds


def methods_of_island(sync: SyncConfig, parts: MethodContext) -> Methods:
    """Return PSDP, and the method of one island of a fleet; raise `UserError` if `sync` joins no islands.

    - `parts.layout`: the island's own mesh
    """
    rounds = rounds_of(sync)
    check_island(rounds, parts)
    inner = parts.psdp_on(parts.layout)
    outer, schedule = rounds.outer_optimizer(inner, parts), rounds.schedule_of(inner.model)
    return Methods(inner, Island(inner, outer, schedule, rounds.mixing, parts.reduce, parts.compiler_options))


def check_island(sync: DilocoConfig, parts: MethodContext) -> None:
    """Raise `UserError` for settings that need replicas in one mesh."""
    islands = parts.layout.mesh.shape[ISLAND]
    if islands > 1:
        raise UserError(
            f"mesh.island is {islands}: these are islands in one mesh, which `gregale train` joins. An island of a "
            f"fleet is a process of its own with a mesh of its own: set mesh.island to 1."
        )
    if (schedule := sync.schedule(layers=2**31)).delay > (most := sync.period // schedule.fragments):
        raise UserError(
            f"sync.delay is {schedule.delay}, and rounds come every sync.period / sync.fragments = {sync.period} / "
            f"{schedule.fragments} steps: an island has one message on its way at a time, so a fragment arrives "
            f"before the next one is sent. Set sync.delay to at most {most}."
        )
    refused = {
        "sync.warmup_steps": (sync.warmup_steps, 0, "islands train apart from the first step"),
        "sync.dropout": (sync.dropout, 0, "an island that misses a round misses it in earnest"),
        "reduce.measure": (parts.reduce.measure, False, "the outer parameters are not on the devices"),
    }
    for key, (found, wanted, why) in refused.items():
        if found != wanted:
            raise UserError(f"{key} is {str(found).lower()}, but {why}. Set it to {str(wanted).lower()}.")
    if sync.outer.clip_norm is not None and jax.process_count() > 1:
        raise UserError(
            f"sync.outer.clip_norm is {sync.outer.clip_norm:g}, but this island has {jax.process_count()} hosts, "
            f"each of which has a part of the pseudo-gradient and would clip by the norm of that part. Set "
            f"sync.outer.clip_norm to null."
        )
