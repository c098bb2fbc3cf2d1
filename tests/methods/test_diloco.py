"""DiLoCo and Streaming DiLoCo against a slow rewrite in NumPy, one replica after the other."""

from copy import deepcopy
from dataclasses import dataclass, replace

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis, NamedArray

from gregale.axes.layout import (
    EMBED,
    ISLAND,
    LORA_RANK,
    REPLICA,
    MeshConfig,
    make_mesh,
    standard_layout,
    vmap_over,
    with_rank,
)
from gregale.codecs.codec import ReduceConfig
from gregale.communication.quantised import QuantisedReducer
from gregale.methods.diloco import Diloco, QuantisedOuter, sending_layout, sync_axis
from gregale.methods.method import PsdpState
from gregale.methods.psdp import Psdp
from gregale.methods.schedule import FRAGMENT, Fragment, Schedule
from gregale.optim import Optimizer
from gregale.optim.moments import Int8Moment
from gregale.training.state import Stepper, initial_state

LAYERS, WIDTH, ROWS = 5, 8, 16
Layers, Embed, Batch = Axis("layers", LAYERS), Axis("embed", WIDTH), Axis("batch", ROWS)
SCALES = np.arange(1, LAYERS + 1, dtype=np.float32) / LAYERS
INNER_RATE, OUTER_RATE, MOMENTUM = 0.05, 0.7, 0.9


class Deep(eqx.Module):
    """x . (sum over layers of scale_l * w_l + rest): linear, with parameters that are stacked and one that is not."""

    stacked: NamedArray  # [Layers, Embed]
    rest: NamedArray  # [Embed]


def squared_error(model: Deep, batch):
    weights = hax.sum(model.stacked * hax.named(jnp.asarray(SCALES), Layers), Layers) + model.rest
    error = hax.dot(batch["x"], weights, axis=Embed) - batch["y"]
    return hax.sum(batch["mask"] * error * error).scalar(), hax.sum(batch["mask"]).scalar()


def first_model() -> Deep:
    random = np.random.default_rng(0)
    stacked = random.normal(size=(LAYERS, WIDTH)).astype(np.float32)
    rest = random.normal(size=WIDTH).astype(np.float32)
    return Deep(hax.named(jnp.asarray(stacked), (Layers, Embed)), hax.named(jnp.asarray(rest), Embed))


def rows(step: int, uneven: bool = False) -> dict[str, np.ndarray]:
    random = np.random.default_rng(100 + step)
    x = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
    y = (x.sum(1) + random.normal(size=ROWS)).astype(np.float32)
    mask = np.ones(ROWS, np.float32)
    if uneven:
        mask[[0, 1, 2, 5, 6, 12]] = 0  # 1, 2, 4 and 3 rows that count for four replicas, and others in the next step
        mask = np.roll(mask, step * ROWS // 4)
    return {"x": x, "y": y, "mask": mask}


def named_batch(values: dict[str, np.ndarray]):
    axes = {"x": (Batch, Embed), "y": (Batch,), "mask": (Batch,)}
    return {name: hax.named(jnp.asarray(value), axes[name]) for name, value in values.items()}


@dataclass
class Slow:
    """The algorithm as it is written down, in float64: SEND after step t, APPLY after step t + tau."""

    schedule: Schedule
    replicas: int
    alpha: float
    inner_rate: float = INNER_RATE
    outer_rate: float = OUTER_RATE
    momentum: float = MOMENTUM

    def __post_init__(self):
        model = first_model()
        self.theta = np.concatenate([np.asarray(model.stacked.array), np.asarray(model.rest.array)[None]]).astype(float)
        self.velocity = np.zeros_like(self.theta)
        self.own = [self.theta.copy() for _ in range(self.replicas)]
        self.seen = np.zeros((self.schedule.fragments, self.replicas))
        self.in_flight = {}

    def rows_of(self, fragment: int) -> list[int]:
        if self.schedule.fragments == 1:
            return list(range(LAYERS + 1))
        return [LAYERS] if fragment == 0 else self.schedule.layers_of(fragment).tolist()

    def step(self, t: int, values: dict[str, np.ndarray]):
        count = ROWS // self.replicas
        scales = np.append(SCALES, 1.0)
        for k in range(self.replicas):
            x, y, mask = (values[name][k * count : (k + 1) * count].astype(float) for name in ("x", "y", "mask"))
            error = x @ (scales @ self.own[k]) - y
            slope = 2 * (mask * error) @ x / mask.sum()
            self.own[k] = self.own[k] - self.inner_rate * scales[:, None] * slope
            self.seen[:, k] += mask.sum()
        if (fragment := self.schedule.sent(t)) is not None:
            self.send(fragment, t)
        if (fragment := self.schedule.applied(t)) is not None:
            where, arrived = self.in_flight.pop(t)
            for k in range(self.replicas):
                self.own[k][where] = self.alpha * self.own[k][where] + (1 - self.alpha) * arrived

    def send(self, fragment: int, t: int):
        where = self.rows_of(fragment)
        share = self.seen[fragment] / self.seen[fragment].sum()
        gradient = self.theta[where] - sum(s * own[where] for s, own in zip(share, self.own, strict=True))
        self.velocity[where] = self.momentum * self.velocity[where] + gradient
        self.theta[where] -= self.outer_rate * (gradient + self.momentum * self.velocity[where])
        self.in_flight[t + self.schedule.delay] = where, self.theta[where].copy()
        self.seen[fragment] = 0

    def read(self, t: int) -> np.ndarray:
        """theta after one more synchronisation: what is on its way arrives, then all fragments are sent."""
        more = deepcopy(self)
        for where, arrived in self.in_flight.values():
            for own in more.own:
                own[where] = self.alpha * own[where] + (1 - self.alpha) * arrived
        for fragment in np.flatnonzero(self.seen.sum(1)):
            more.send(fragment, t)
        return more.theta


class ThroughMessages(Diloco):
    """Sends differences and updates as messages like a quantised run, but of whole float32 values."""

    @property
    def outer_store(self):
        layout = sending_layout(self.outer_layout, self.axis)
        return QuantisedOuter(self.outer, QuantisedReducer(layout, ReduceConfig(), self.axis))


def make(mesh: MeshConfig, schedule: Schedule, alpha: float = 0.0, outer=None, kind=Diloco, **more) -> Diloco:
    sizes = [mesh.island, mesh.replica, mesh.data, mesh.model]
    layout = standard_layout(make_mesh(mesh, jax.devices()[: int(np.prod(sizes))]))
    inside = layout.inside(sync_axis(layout))
    inner = Psdp(first_model(), squared_error, Optimizer.of(optax.sgd(INNER_RATE)), inside)
    outer = outer or optax.sgd(OUTER_RATE, momentum=MOMENTUM, nesterov=True)
    return kind(inner, outer, layout, schedule, mixing=alpha, **more)


def values_of(model) -> np.ndarray:
    """[..., layers + 1, embed]: the stacked parameters with the others behind them."""
    stacked = np.asarray(model.stacked.rearrange((..., "layers", "embed")).array)
    return np.concatenate([stacked, np.asarray(model.rest.rearrange((..., "embed")).array)[..., None, :]], axis=-2)


def begin(method: Diloco | Psdp):
    return initial_state(method, first_model), Stepper(method, first_model())


def after(method: Diloco | Psdp, steps: int):
    """The state of the method after some steps, and its stepper."""
    state, stepper = begin(method)
    for t in range(1, steps + 1):
        state, _ = stepper(state, named_batch(rows(t)), t)
    return state, stepper


CASES = {
    "diloco": (MeshConfig(replica=4, data=2), Schedule(3), 0.0),
    "one replica": (MeshConfig(replica=1, data=2), Schedule(3), 0.0),
    "two islands": (MeshConfig(island=2, replica=2, data=2), Schedule(3), 0.0),
    "tau 0": (MeshConfig(replica=4, data=2), Schedule(4, 3, 0, LAYERS), 0.25),
    "tau 1": (MeshConfig(replica=4, data=2), Schedule(4, 3, 1, LAYERS), 0.5),
    "tau 2, sequential": (MeshConfig(replica=2, data=2), Schedule(5, 4, 2, LAYERS, "sequential"), 0.25),
    "tau 3, every layer": (MeshConfig(replica=4, data=2), Schedule(7, 6, 3, LAYERS), 0.5),
}
MESSAGES = ("two islands", "tau 1")


QUICK = ("diloco", "tau 1")


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *(pytest.param(case, Diloco, marks=[pytest.mark.quick] if case in QUICK else []) for case in CASES),
        *((case, ThroughMessages) for case in MESSAGES),
    ],
)
def test_every_step_equals_the_slow_rewrite(case, kind):
    """Replicas after each step, and what reads the model after it, over more than two periods.

    Replicas have tokens of uneven number.
    """
    mesh, schedule, alpha = CASES[case]
    method = make(mesh, schedule, alpha, kind=kind)
    slow = Slow(schedule, method.layout.mesh.shape[method.axis], alpha)
    state, stepper = begin(method)
    outer = jax.jit(method.outer_parameters)
    for t in range(1, 2 * schedule.period + schedule.delay + 2):
        values = rows(t, uneven=True)
        state, _ = stepper(state, named_batch(values), t)
        slow.step(t, values)
        np.testing.assert_allclose(values_of(state.method.inner.parameters), slow.own, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(values_of(outer(state.method)), slow.read(t), rtol=1e-5, atol=1e-5)


def test_the_slow_rewrite_can_fail():
    mesh, schedule, alpha = CASES["tau 1"]
    method = make(mesh, schedule, alpha)
    slow, steps = Slow(schedule, 4, alpha, momentum=0.0), 2 * schedule.period + 1
    state, _ = after(method, steps)
    for t in range(1, steps + 1):
        slow.step(t, rows(t))
    assert np.abs(values_of(state.method.inner.parameters) - np.asarray(slow.own)).max() > 1e-2


@pytest.mark.quick
@pytest.mark.parametrize("index", range(4))
def test_a_fragment_has_the_layers_and_the_counter_of_its_own_group(index):
    """So the unsent rest of an array and the steps of its feedback are those of the group that is sent."""
    schedule = Schedule(5, 4, 2, LAYERS)
    rows = [LAYERS] if index == 0 else schedule.layers_of(index)
    steps = hax.named(jnp.arange(4), FRAGMENT)
    tree = {"model": first_model(), "steps": steps}
    fragment = Fragment.at(schedule, index, 7)
    part = fragment.take(tree)
    assert int(part["steps"]) == index
    before, put = values_of(tree["model"]), fragment.put(tree, jax.tree.map(lambda leaf: leaf + 10, part))
    changed = values_of(put["model"]) - before
    np.testing.assert_allclose(changed, np.isin(np.arange(LAYERS + 1), rows)[:, None] * np.full(WIDTH, 10.0), atol=1e-5)
    np.testing.assert_array_equal(put["steps"].array, np.arange(4) + 10 * (np.arange(4) == index))


@pytest.mark.quick
def test_messages_between_islands_are_shards_of_the_replicas_inside():
    """Of adapters too, whose rank lies like `embed`."""
    config = MeshConfig(island=2, replica=2, data=2)
    layout = with_rank(standard_layout(make_mesh(config, jax.devices()[:8])), 8)
    finest = replace(
        layout, opt_state={**layout.opt_state, **dict.fromkeys((EMBED, LORA_RANK), ("data", REPLICA, ISLAND))}
    )
    sent = sending_layout(finest, ISLAND).params
    assert (sent[EMBED], sent[LORA_RANK]) == (("data", REPLICA),) * 2
    assert LORA_RANK not in sending_layout(standard_layout(layout.mesh), ISLAND).params


def test_a_method_compiles_one_program_for_each_kind_of_step():
    method = make(MeshConfig(replica=4, data=2), Schedule(12, 6, 2, LAYERS), 0.5)
    _, stepper = after(method, 27)
    # nothing; layers sent; layers applied; the rest sent; the rest applied (offsets are two steps apart = the delay,
    # so that a send meets the application of the fragment before it only one step later).
    assert stepper.program._cache_size() <= 5


def test_one_replica_is_evaluated_and_handed_over_with_its_last_period():
    """P = 1, tau = 1, an outer rate of one: what reads theta finds the replica's own parameters after every step."""
    method = make(MeshConfig(replica=1, data=2), Schedule(3, delay=1), outer=optax.sgd(1.0))
    state, stepper = begin(method)
    forms = [jax.jit(method.eval_model), jax.jit(lambda state: method.to_psdp(state).parameters)]
    for t in range(1, 7):
        state, _ = stepper(state, named_batch(rows(t)), t)
        own = values_of(state.method.inner.parameters)[0]
        for form in forms:
            np.testing.assert_allclose(values_of(form(state.method)), own, rtol=1e-5, atol=1e-6)
        kept = np.abs(values_of(state.method.outer.parameters) - own).max() > 1e-3
        assert kept == (t != 4), "the state keeps theta, which arrives after step 4"


@pytest.mark.quick
def test_the_average_or_the_first_replica_is_evaluated():
    method = make(MeshConfig(replica=4, data=2), Schedule(3))
    state, _ = after(method, 2)
    own = values_of(state.method.inner.parameters)
    for evaluate, expected in (("average", own.mean(axis=0)), ("first_replica", own[0])):
        model = jax.jit(replace(method, evaluate=evaluate).eval_model)(state.method)
        np.testing.assert_allclose(values_of(model), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.quick
def test_a_replica_that_is_left_out_goes_on_from_its_own():
    """And changes no other, even if its parameters are not finite."""
    schedule = Schedule(2)
    method = make(MeshConfig(replica=4, data=2), schedule, outer=optax.sgd(1.0), dropout=0.5, seed=3)
    fragment = Fragment.at(schedule, 0, 2)
    took_part = np.asarray(method.round.participation_mask(fragment).array) > 0
    assert 0 < took_part.sum() < 4
    state, _ = begin(method)
    state = jax.jit(method.step)(state.method, named_batch(rows(1)))[0]
    broken, *_ = np.flatnonzero(~took_part)
    parameters = jax.tree.map(lambda each: each.at[broken].set(jnp.nan), state.inner.parameters)
    state = state._replace(inner=state.inner._replace(parameters=parameters))
    before = values_of(state.inner.parameters)
    state, measured = jax.jit(method.synchronise)(state, fragment)
    np.testing.assert_array_equal(np.asarray(measured.weight) > 0, took_part)
    reached = values_of(state.inner.parameters)
    np.testing.assert_array_equal(reached[~took_part], before[~took_part])
    for own in reached[took_part]:
        np.testing.assert_allclose(own, before[took_part].mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.quick
def test_each_synchronisation_draws_anew_which_replicas_it_leaves_out():
    schedule = Schedule(2)
    method = make(MeshConfig(replica=4, data=2), schedule, dropout=0.5, seed=3)
    participation_mask = jax.jit(method.round.participation_mask)
    drawn = np.array(
        [participation_mask(Fragment.at(schedule, 0, step)).array for step in range(2, 130, 2)]
    )  # [64, replica]
    assert len(np.unique(drawn, axis=0)) > 8, "of 16 possible"
    assert ((drawn.mean(0) > 0) & (drawn.mean(0) < 1)).all(), "no replica is always in, or always out"


@pytest.mark.quick
def test_psdp_becomes_diloco_and_back():
    method = make(MeshConfig(replica=4, data=2), Schedule(2))
    layout = method.layout
    psdp = Psdp(first_model(), squared_error, Optimizer.of(optax.sgd(INNER_RATE, momentum=0.9)), layout)
    method = Diloco(
        Psdp(psdp.model, squared_error, psdp.optimizer, layout.inside("replica")), method.outer, layout, method.schedule
    )
    start = jax.jit(psdp.init)()
    start, _ = jax.jit(psdp.step)(start, named_batch(rows(1)))
    state = jax.jit(method.from_psdp)(start)
    to_psdp = jax.jit(method.to_psdp)
    for one, other in zip(jax.tree.leaves(start), jax.tree.leaves(to_psdp(state)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    state, _ = jax.jit(method.step)(state, named_batch(rows(2)))
    own, joined = (values_of(each.sharded[0].trace) for each in (state.inner, to_psdp(state)))
    np.testing.assert_allclose(joined, own.mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.quick
def test_moments_in_eight_bits_are_joined_by_their_values():
    method = make(MeshConfig(replica=4, data=1), Schedule(2))
    names, layout = ("replica", "mlp", "embed"), method.layout
    values = np.random.default_rng(0).normal(size=(4, 3, 64)).astype(np.float32)
    own = vmap_over(lambda each: Int8Moment.of(each, 1), "replica", layout)(NamedArray(jnp.asarray(values), names))
    state = PsdpState({}, {"m": own}, {})
    joined = jax.jit(lambda state: method.replicas.joined(state, {}))(state).sharded["m"].decoded().array
    expected = np.asarray(vmap_over(Int8Moment.decoded, "replica", layout)(own).array).mean(0)
    np.testing.assert_allclose(joined, expected, rtol=0.1, atol=0.02)
    np.testing.assert_allclose(np.asarray(joined).mean(), expected.mean(), atol=2e-3)
