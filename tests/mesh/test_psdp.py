"""PSDP on eight devices: equal to plain optax on one in float64, and what its compiled program sends."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gregale.axes.layout import EMBED, REPLICA, TENSOR_PARALLEL, Layout, named_arrays
from gregale.cost import Audit, audit
from gregale.methods.psdp import Psdp
from gregale.optim import AdamWConfig, ConstantSchedule, MuonConfig, OptimizerConfig
from tests.conventional import conventional_step
from tests.cost.warnings import rematerializations
from tests.mesh.support import SMALL, executed, layout_of, placed, small_model, token_batch
from tests.model import oracle

pytestmark = pytest.mark.usefixtures("compiled_anew")  # plans tell what the compiler warns of

STEPS = 2
# AdamW's first update, lr g / (|g| + epsilon), turns an error of g into one lr epsilon / (|g| + epsilon)^2 as large. Of
# these parameters one has a gradient of 1e-7, ten times the epsilon. At a rate of 1e-2 it alone is more than 1e-5 off,
# by 1.3e-5 to 4.9e-5 over the meshes; plain float32 on one device misses float64 by 1.5e-5 there. The gradients of all
# meshes are as near to float64 as plain float32's (1e-6 of a tensor's norm), and on a step's own gradients AdamW in
# float64 makes the same parameters to 1e-7. So the rate here is AdamWConfig's default, 1e-3, and what a low rate could
# hide is checked apart from it: the gradients, by AdamW's first moments, and how far the parameters moved.
LEARNING_RATE = 1e-3
GRADIENT_TOLERANCE = 5e-6
MOVEMENT_TOLERANCE = 2e-4  # the parameters' own rounding is 6e-5 of what they move in a step
ADAMW = AdamWConfig(learning_rate=LEARNING_RATE, schedule=ConstantSchedule())

TABLE = [  # (replica, data, model), microbatches, first layers whose passes hide the transfers of the others
    ((1, 8, 1), 2, 0),  # so few tokens at a time that the embedding's rows are exchanged
    ((1, 1, 8), 4, 0),
    ((8, 1, 1), 1, 1),
    pytest.param((2, 2, 2), 4, 0, marks=pytest.mark.quick),
]


def psdp(layout: Layout, microbatches: int, optimizer: OptimizerConfig = ADAMW, first_layers: int = 0) -> Psdp:
    model = small_model()
    run = executed(layout.inside_replica(), loss_block=48, first_layers=first_layers)
    built = optimizer.build(eqx.filter(model, eqx.is_inexact_array), STEPS, layout)
    step = Psdp(model, lambda model, batch: model.loss(batch, run), built, layout, microbatches)
    return replace(step, first_layers=first_layers)


def batches(uneven: bool):
    return [token_batch(seed=seed, uneven=uneven) for seed in range(STEPS)]


class Outcome(NamedTuple):
    """What steps of training come to; plain arrays by name."""

    losses: list[float]
    norms: list[float]  # of the gradients, before clipping
    moment: oracle.Weights  # AdamW's first: a weighted sum of the clipped gradients of all steps
    weights: oracle.Weights


class Program(NamedTuple):
    """A compiled step."""

    run: Callable
    audit: Audit
    rematerializations: list[str]


def compiled(step, layout: Layout, *arguments, **options) -> Program:
    with rematerializations() as warnings:
        program = jax.jit(step, **options).lower(*arguments).compile()
    return Program(program, audit(program, layout.mesh), warnings)


class Trainer:
    """Two steps of a method from its first state, compiled once."""

    def __init__(self, method: Psdp):
        shardings = method.shardings(jax.eval_shape(method.init))
        self.method, self.layout = method, method.layout
        self.init = jax.jit(method.init, out_shardings=shardings)
        # The program takes no other shardings, so what a step returns goes into the next one as it is.
        self.step = compiled(
            method.step, self.layout, self.init(), self.batch(token_batch()), out_shardings=(shardings, None)
        )

    def batch(self, batch: dict):
        return placed(batch, self.layout, self.layout.compute)

    def run(self, uneven: bool) -> Outcome:
        state, losses, norms = self.init(), [], []
        for batch in batches(uneven):
            state, metrics = jax.block_until_ready(self.step.run(state, self.batch(batch)))
            losses.append(float(metrics.loss))
            norms.append(float(metrics.grad_norm))
            assert float(metrics.weight) == float(np.sum(batch["loss_mask"].array))
        trees = first_moment(state.sharded), state.parameters
        return Outcome(losses, norms, *(plain_arrays(self.method.model_with(tree)) for tree in trees))


@cache
def trainer(sizes: tuple[int, int, int], microbatches: int, first_layers: int = 0) -> Trainer:
    return Trainer(psdp(layout_of(*sizes), microbatches, first_layers=first_layers))


def first_moment(state):
    """AdamW's first moment in an optimizer's state; None for the parameters that Muon trains."""

    def is_adam(node) -> bool:
        return isinstance(node, optax.ScaleByAdamState)

    def is_masked(node) -> bool:
        return isinstance(node, optax.MaskedNode)

    moment = next(leaf.mu for leaf in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(leaf))
    return jax.tree.map(lambda leaf: None if is_masked(leaf) else leaf, moment, is_leaf=is_masked)


def plain_arrays(model) -> oracle.Weights:
    return jax.device_get(oracle.plain_weights(model))


def plain_adamw() -> optax.GradientTransformation:
    """What `ADAMW` asks for, in optax's own words."""
    decays = {"embedding", "head", "query", "key", "value", "out", "gate", "up", "down"}

    def mask(weights):
        return {name: name in decays for name in weights}

    adamw = optax.adamw(LEARNING_RATE, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=mask)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def mean_loss(weights, batch):
    total, weight = oracle.loss(weights, batch, SMALL)
    return total / weight


def mean_of_means(weights, batch):
    """What averaging the means of four microbatches would minimise."""
    mask = batch["loss_mask"].reshape(4, -1)
    losses = oracle.losses(weights, batch, SMALL).reshape(4, -1)
    return jnp.mean(jnp.sum(losses * mask, axis=1) / jnp.sum(mask, axis=1))


@cache
def plain_step(loss):
    def step(weights, state, batch):
        value, gradients = jax.value_and_grad(loss)(weights, batch)
        updates, state = plain_adamw().update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, value, optax.global_norm(gradients)

    return jax.jit(step)


def plain_run(loss, uneven: bool) -> Outcome:
    """Two steps of plain optax on one device, with the plain model and in float64."""
    first = first_weights()  # made outside, in float32
    with jax.enable_x64(True):
        weights = {name: jnp.asarray(array, jnp.float64) for name, array in first.items()}
        state, step, losses, norms = plain_adamw().init(weights), plain_step(loss), [], []
        for batch in batches(uneven):
            weights, state, value, norm = step(weights, state, oracle.plain_batch(batch))
            losses.append(float(value))
            norms.append(float(norm))
        return Outcome(losses, norms, jax.device_get(first_moment(state)), jax.device_get(weights))


@cache
def first_weights() -> oracle.Weights:
    return plain_arrays(small_model())


@pytest.fixture(scope="module")
def expected():
    return {uneven: plain_run(mean_loss, uneven) for uneven in (False, True)}


def furthest(left: oracle.Weights, right: oracle.Weights) -> float:
    """The largest difference of an element."""
    assert left.keys() == right.keys()
    return max(float(np.abs(left[name] - right[name]).max()) for name in left)


def relative_errors(found: oracle.Weights, exact: oracle.Weights) -> dict[str, float]:
    """|found - exact| / |exact| of each tensor, by L2 norms."""
    return {name: float(np.linalg.norm(found[name] - exact[name]) / np.linalg.norm(exact[name])) for name in exact}


def movement(outcome: Outcome) -> oracle.Weights:
    return {name: weights - first_weights()[name] for name, weights in outcome.weights.items()}


def assert_state_is_split(trainer: Trainer, replica: int, data: int, model: int) -> None:
    """A shard of the optimizer's state is one of replica x data, and of `model` where its array is split by that."""
    state = trainer.init()
    moments = [leaf for leaf in named_arrays(state.sharded) if leaf.ndim]
    assert len(moments) == 2 * len(named_arrays(trainer.method.model))
    for leaf in moments:
        over_model = prod(model for name in leaf.axis_names if name in TENSOR_PARALLEL)
        for shard in leaf.array.addressable_shards:
            assert shard.data.size * replica * data * over_model == leaf.array.size
    assert all(leaf.size == 1 for leaf in jax.tree.leaves(state.gathered))


@pytest.mark.parametrize(("sizes", "microbatches", "first_layers"), TABLE)
def test_any_mesh_and_microbatches_equal_plain_optax_on_one_device(expected, sizes, microbatches, first_layers):
    method = trainer(sizes, microbatches, first_layers)
    assert_state_is_split(method, *sizes)
    for uneven in (False, True):
        found, exact = method.run(uneven), expected[uneven]
        np.testing.assert_allclose(found.losses, exact.losses, atol=1e-5)
        assert furthest(found.weights, exact.weights) < 1e-5
        np.testing.assert_allclose(found.norms, exact.norms, rtol=GRADIENT_TOLERANCE)
        assert max(relative_errors(found.moment, exact.moment).values()) < GRADIENT_TOLERANCE
        assert max(relative_errors(movement(found), movement(exact)).values()) < MOVEMENT_TOLERANCE


def test_a_mean_of_microbatch_means_would_fail(expected):
    """With an uneven mask it is another loss and trains other parameters; without one it is the same."""
    found, exact = plain_run(mean_of_means, uneven=True), expected[True]
    assert abs(found.losses[0] - exact.losses[0]) > 1e-3
    assert furthest(found.weights, exact.weights) > 1e-3
    assert min(relative_errors(found.moment, exact.moment).values()) > 10_000 * GRADIENT_TOLERANCE
    assert min(relative_errors(movement(found), movement(exact)).values()) > 50 * MOVEMENT_TOLERANCE
    even = plain_run(mean_of_means, uneven=False)
    assert even.losses == pytest.approx(expected[False].losses, abs=1e-5)
    assert max(relative_errors(even.moment, expected[False].moment).values()) < GRADIENT_TOLERANCE


@pytest.fixture(scope="module")
def program() -> Program:
    return trainer((2, 2, 2), 4).step


@pytest.fixture(scope="module")
def conventional() -> Program:
    layout = layout_of(2, 2, 2)
    run = executed(layout, loss_block=48)
    parameters = placed(small_model(), layout, layout.params)
    optimizer = ADAMW.build(parameters, STEPS).whole()
    step = conventional_step(lambda model, batch: model.loss(batch, run), optimizer, layout, microbatches=4)
    state = jax.jit(optimizer.init)(parameters)
    return compiled(step, layout, parameters, state, placed(token_batch(), layout, layout.compute))


def over_replica_in_loops(program: Program) -> list:
    return [collective for collective in program.audit.over(REPLICA) if collective.loop]


def expected_bytes() -> Counter:
    """Bytes of a parameter's shard under `params`, a float32 each: what one reduce-scatter or all-gather carries."""
    split = dict.fromkeys((EMBED, "heads", "kv_heads", "mlp", "vocab"), 2)
    return Counter(
        4 * prod(axis.size // split.get(axis.name, 1) for axis in leaf.axes) for leaf in named_arrays(small_model())
    )


def test_nothing_crosses_replica_inside_the_microbatch_loop(program):
    assert over_replica_in_loops(program) == []
    assert not program.audit.unknown()
    inside = [each for each in program.audit.collectives if each.loops]
    assert len(inside) > 10, "the loop is there, with collectives over data and model"
    assert {loop.times for each in inside for loop in each.loops} >= {4}
    assert {collective.kind for collective in program.audit.collectives} == {
        "all-reduce",
        "reduce-scatter",
        "all-gather",
    }
    assert program.rematerializations == []


def test_the_conventional_step_crosses_replica_in_every_microbatch(program, conventional):
    """The check above finds what it looks for, and this is what PSDP is for."""
    inside = over_replica_in_loops(conventional)
    assert sum(c.bytes * c.times for c in inside) >= 4 * sum(expected_bytes().elements())
    assert {collective.times for collective in inside} & {4, 8}
    usual, sent = (sum(c.bytes_sent * c.times for c in each.audit.over(REPLICA)) for each in (conventional, program))
    assert usual > 3.9 * sent, "four microbatches, four times as much"


def test_bytes_over_replica_are_the_closed_form(program):
    """One reduce-scatter of the gradient's shard and one all-gather of the update's, for every parameter."""
    found = {"reduce-scatter": Counter(), "all-gather": Counter()}
    scalars = []
    for collective in program.audit.over(REPLICA):
        if collective.kind in found:
            assert collective.axes == (REPLICA,)
            assert collective.dtype == "f32"
            assert len(collective.shapes) == 1
            found[collective.kind][collective.bytes] += 1
        else:
            scalars.append(collective)
    assert found["reduce-scatter"] == found["all-gather"] == expected_bytes()
    total = sum(expected_bytes().elements())
    assert sum(c.bytes for c in program.audit.over(REPLICA) if c not in scalars) == 2 * total
    for collective in scalars:
        assert (collective.kind, collective.times) == ("all-reduce", 1)
        assert collective.bytes < 64, "the loss, the weights, and the norm's addends"


def test_what_passes_hide_crosses_replica_once_too():
    """With the arrays of the first layer apart."""
    program, leaves = trainer((8, 1, 1), 1, 1).step, named_arrays(small_model())
    assert over_replica_in_loops(program) == []
    for kind in ("reduce-scatter", "all-gather"):
        found = [each.bytes for each in program.audit.over(REPLICA) if each.kind == kind]
        assert len(found) == sum(2 if "layers" in leaf.axis_names else 1 for leaf in leaves)
        assert sum(found) == 4 * sum(leaf.size for leaf in leaves)


def test_muon_on_a_mesh_equals_muon_on_one_device():
    config = MuonConfig(learning_rate=LEARNING_RATE, schedule=ConstantSchedule(), iterations=1)
    one = Trainer(psdp(layout_of(1, 1, 1), 1, config)).run(True)
    eight = Trainer(psdp(layout_of(2, 2, 2), 4, config)).run(True)
    np.testing.assert_allclose(eight.losses, one.losses, atol=1e-5)
    assert furthest(eight.weights, one.weights) < 1e-5
