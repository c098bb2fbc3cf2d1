"""A small model, and a fleet of islands in one process that is driven by hand, in lock step."""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from haliax import Axis, NamedArray

from gregale.axes.layout import Layout
from gregale.codecs.codec import ReduceConfig
from gregale.islands.method import Island
from gregale.islands.outer import HostOuter
from gregale.islands.shards import on_host
from gregale.methods.diloco import Diloco
from gregale.methods.psdp import Psdp
from gregale.methods.schedule import Fragment, Schedule
from gregale.optim import Optimizer
from gregale.training.state import Stepper, initial_state
from tests.communication.links import all_together
from tests.mesh.support import layout_of

LAYERS, ROWS = 3, 4
Layers, Embed, Mlp = Axis("layers", LAYERS), Axis("embed", 128), Axis("mlp", 64)  # whole blocks of 64 at R = 2
EXACTLY = ReduceConfig()
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


class Net(eqx.Module):
    """gain * (sum over layers and mlp of tanh(x up)) + x . readout: arrays with and without layers, and a scalar."""

    up: NamedArray  # [layers, embed, mlp]
    readout: NamedArray  # [embed]
    gain: NamedArray  # []

    @staticmethod
    def init() -> "Net":
        one, two = jax.random.split(jax.random.key(0))
        up, readout = hax.random.normal(one, (Layers, Embed, Mlp)), hax.random.normal(two, (Embed,))
        return Net(0.1 * up, 0.1 * readout, hax.named(jnp.float32(0.1), ()))


def squared_error(net: Net, batch):
    hidden = hax.tanh(hax.dot(batch["x"], net.up, axis=Embed))
    out = net.gain * hax.sum(hidden, (Layers, Mlp)) + hax.dot(batch["x"], net.readout, axis=Embed)
    error = out - batch["y"]
    return hax.sum(batch["mask"] * error * error).scalar(), hax.sum(batch["mask"]).scalar()


def rows(step: int, members: int, uneven: bool = False) -> dict[str, np.ndarray]:
    """The rows of all members, ROWS each; with `uneven` member k masks k of its rows."""
    random = np.random.default_rng(step)
    x = random.normal(size=(members * ROWS, Embed.size)).astype(np.float32)
    mask = np.ones((members, ROWS), np.float32)
    for k in range(members if uneven else 0):
        mask[k, : k % ROWS] = 0
    return {"x": x, "y": np.sin(x.sum(axis=1)).astype(np.float32), "mask": mask.reshape(-1)}


def batch_of(values: dict[str, np.ndarray], layout: Layout):
    Rows = Axis("batch", len(values["y"]))
    axes = {"x": (Rows, Embed), "y": (Rows,), "mask": (Rows,)}
    named = {name: NamedArray(value, tuple(axis.name for axis in axes[name])) for name, value in values.items()}
    return jax.device_put(named, layout.shardings(named, layout.compute))


def psdp_on(layout: Layout, reduce: ReduceConfig = EXACTLY, rate: float = 1e-3, microbatches: int = 1) -> Psdp:
    optimizer = Optimizer.of(optax.adam(rate))
    return Psdp(jax.eval_shape(Net.init), squared_error, optimizer, layout, microbatches, reduce=reduce)


def island_on(layout: Layout, schedule: Schedule, mixing: float = 0.0, reduce: ReduceConfig = EXACTLY) -> Island:
    return Island(psdp_on(layout), OUTER, schedule, mixing, reduce)


@cache
def on_one_device(schedule: Schedule, mixing: float = 0.0, reduce: ReduceConfig = EXACTLY) -> Island:
    """An island that tests share, with what is compiled for it."""
    return island_on(layout_of(), schedule, mixing, reduce)


STEPPERS: dict[int, tuple[Island, Stepper]] = {}


@dataclass
class Member:
    island: Island
    step: Stepper
    state: Any = None  # None: of Net
    host: HostOuter = field(init=False)
    seen: np.ndarray = field(init=False)  # [fragment]
    errors: dict[int, Any] = field(default_factory=dict)  # of fragments that are on their way

    def __post_init__(self):
        if self.state is None:
            self.state = initial_state(self.island, Net.init)
        self.host = HostOuter(self.island)
        self.host.begin(self.state.method.psdp.parameters)
        self.seen = np.zeros(self.island.schedule.fragments)

    def train(self, values: dict[str, np.ndarray], step: int) -> None:
        self.took(batch_of(values, self.island.layout), step)

    def took(self, batch: Any, step: int) -> None:
        self.state, report = self.step(self.state, batch, step)
        self.seen += float(report.metrics.weight)

    def depart(self, index: int) -> dict[str, np.ndarray]:
        sent, self.errors[index] = self.island.depart(self.state.method, self.host.theta(index), self.fragment(index))
        return on_host(sent)

    def arrive(self, index: int, keep: float) -> None:
        moved = self.island.arrive(
            self.state.method, self.host.theta(index), self.fragment(index), keep, self.errors.pop(index)
        )
        self.state = self.state._replace(method=moved)

    def fragment(self, index: int):
        return self.island.fragment(index)

    @property
    def parameters(self) -> list[np.ndarray]:
        return [np.asarray(array) for array in jax.tree.leaves(self.state.method.psdp.parameters)]

    @property
    def theta(self) -> list[np.ndarray]:
        """theta, put together of the fragments."""
        whole = self.state.method.psdp.parameters
        for index in range(self.island.schedule.fragments):
            whole = self.fragment(index).put(whole, jax.device_get(self.host.theta(index)))
        return [np.asarray(array) for array in jax.tree.leaves(whole)]


class Fleet:
    """Islands in lock step: after each step what is due is sent, and applied `delay` steps later."""

    def __init__(self, members: list[Member], uneven: bool = False):
        self.members, self.uneven, self.rounds = members, uneven, 0

    @staticmethod
    def of(islands: list[Island], uneven: bool = False) -> "Fleet":
        """Equal islands may be one and the same object, and share what is compiled."""
        for island in islands:
            if id(island) not in STEPPERS:
                STEPPERS[id(island)] = island, Stepper(island, jax.eval_shape(Net.init))
        return Fleet([Member(island, STEPPERS[id(island)][1]) for island in islands], uneven)

    def step(self, t: int) -> None:
        values = rows(t, len(self.members), self.uneven)
        for k, member in enumerate(self.members):
            member.train({name: value[k * ROWS : (k + 1) * ROWS] for name, value in values.items()}, t)
        self.follow(t)

    def follow(self, t: int) -> None:
        """What is due after step t."""
        schedule = self.members[0].island.schedule
        if (index := schedule.sent(t)) is not None:
            self.send(index, [member.seen[index] for member in self.members])
        if (index := schedule.applied(t)) is not None:
            for member in self.members:
                member.arrive(index, member.island.mixing)

    def close(self, t: int) -> None:
        """The rounds after the last step, t: each fragment that is not sent after it is, and arrives at once."""
        for member in self.members:
            for index in list(member.errors):
                member.arrive(index, member.island.mixing)
        schedule = self.members[0].island.schedule
        for index in range(schedule.fragments):
            if index != schedule.sent(t):
                self.send(index, [member.seen[index] for member in self.members])
                for member in self.members:
                    member.arrive(index, 0.0)

    def send(self, index: int, weights: list[float], group: str = "all") -> None:
        """SEND of a fragment, committed by all; weights of 0 contribute nothing."""
        members = self.members
        sent = [member.depart(index) for member in members]

        def joined(link):
            host = members[link.rank].host
            mine = sent[link.rank] if weights[link.rank] > 0 else None
            reduced = host.reducer(index).reduce(mine, weights, link, host.error(index, group), timeout_seconds=30)
            return host.prepare(index, reduced, group)

        prepared = all_together(len(members), joined)
        self.rounds += 1
        assert {each.digest for each in prepared} == {prepared[0].digest}
        for member, weight, each in zip(members, weights, prepared, strict=True):
            assert each.finite
            before = member.host.digest
            member.host.commit(each, self.rounds)
            assert before != member.host.digest == each.digest
            member.seen[index] = 0 if weight > 0 else member.seen[index]


class Everywhere(Diloco):
    """The mesh's form of what islands do through codecs: both phases on the pseudo-gradient, the outer step by all."""

    @property
    def outer_layout(self) -> Layout:
        return replace(self.layout, opt_state=self.layout.inside(self.axis).opt_state)


class InOneMesh:
    """The same training by `Diloco` in one mesh."""

    def __init__(
        self, layout: Layout, schedule: Schedule, mixing: float, reduce: ReduceConfig, kind: type[Diloco], uneven: bool
    ):
        inner = psdp_on(layout.inside("replica"))
        self.method = kind(inner, OUTER, layout, schedule, mixing=mixing, reduce=reduce)
        self.state, self.uneven = initial_state(self.method, Net.init), uneven
        self.stepper, self.done = Stepper(self.method, jax.eval_shape(Net.init)), 0

    def step(self, t: int) -> None:
        self.done = t
        layout = self.method.layout
        values = rows(t, layout.replicas, self.uneven)
        self.state, _ = self.stepper(self.state, batch_of(values, layout), t)

    def parameters(self, k: int) -> list[np.ndarray]:
        named = jax.tree.leaves(self.state.method.inner.parameters, is_leaf=lambda x: isinstance(x, NamedArray))
        return [np.asarray(leaf["replica", k].array) for leaf in named]

    @property
    def theta(self) -> list[np.ndarray]:
        """theta after every SEND so far; the next step's program computes the last one if it is delayed."""
        state, schedule = self.state.method, self.method.schedule
        due = Fragment.at(schedule, schedule.sent(self.done) if schedule.delay else None, self.done)
        outer = state.outer
        if due is not None:
            outer, _ = jax.jit(self.method.round.send)(outer, state.inner.parameters, state.seen, due)
        whole = jax.jit(self.method.outer_store.parameters)(outer)
        return [np.asarray(array) for array in jax.tree.leaves(whole)]
