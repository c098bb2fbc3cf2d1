"""PSDP on eight devices: equal to plain optax on one, and what its compiled program sends."""

from __future__ import annotations

from collections import Counter
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

from benchmarks.conventional import conventional_step
from gregale.audit import Audit, audit, captured_compiler_warnings
from gregale.axes.layout import EMBED, REPLICA, TENSOR_PARALLEL, Layout
from gregale.methods.psdp import Psdp
from gregale.model.execution import Execution
from gregale.optim import AdamWConfig, ConstantSchedule, MuonConfig, OptimizerConfig
from tests.mesh.support import SMALL, fast_jit, layout_of, named_leaves, placed, small_model, token_batch
from tests.model import oracle

STEPS = 2
# AdamW divides by the size of the gradient: where that is near its epsilon, rounding in the gradient moves the update
# by some thousandths of the learning rate. With 1e-3 that is well below the tolerance, with 1e-2 it is not.
LEARNING_RATE = 1e-3
ADAMW = AdamWConfig(learning_rate=LEARNING_RATE, schedule=ConstantSchedule())

# (replica, data, model), microbatches
TABLE = [
    ((1, 8, 1), 2),
    ((1, 1, 8), 4),
    ((8, 1, 1), 4),
    ((4, 2, 1), 1),
    ((4, 1, 2), 2),
    ((2, 4, 1), 4),
    ((1, 2, 4), 4),
    ((2, 2, 2), 1),
    ((2, 2, 2), 2),
    ((2, 2, 2), 4),
]


def psdp(layout: Layout, microbatches: int, optimizer: OptimizerConfig = ADAMW) -> Psdp:
    model = small_model()
    run = Execution(layout=layout.inside_replica(), loss_block=48)
    built = optimizer.build(eqx.filter(model, eqx.is_inexact_array), STEPS, layout)
    return Psdp(model, lambda model, batch: model.loss(batch, run), built, layout, microbatches)


def batches(uneven: bool):
    return [token_batch(seed=seed, uneven=uneven) for seed in range(STEPS)]


class Trainer:
    """Two steps of a method from its first state, compiled once."""

    def __init__(self, method: Psdp):
        shardings = method.shardings(jax.eval_shape(method.init))
        self.method = method
        self.init = fast_jit(method.init, out_shardings=shardings)
        self.step = fast_jit(method.step, out_shardings=(shardings, None))

    def run(self, uneven: bool) -> tuple[list[float], oracle.Weights]:
        """The losses and the parameters after the last step."""
        layout, state, losses = self.method.layout, self.init(), []
        for batch in batches(uneven):
            state, metrics = jax.block_until_ready(self.step(state, placed(batch, layout, layout.compute)))
            losses.append(float(metrics.loss))
            assert float(metrics.weight) == float(np.sum(batch["loss_mask"].array))
        assert self.step._cache_size() == 1, "what a step returns goes into the next one as it is"
        return losses, jax.device_get(oracle.plain_weights(self.method.trained(state)))


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
        return optax.apply_updates(weights, updates), state, value

    return fast_jit(step)


def plain_run(loss, uneven: bool) -> tuple[list[float], oracle.Weights]:
    """Two steps of plain optax on one device, with the plain model."""
    weights = oracle.plain_weights(small_model())
    state, step, losses = plain_adamw().init(weights), plain_step(loss), []
    for batch in batches(uneven):
        weights, state, value = step(weights, state, oracle.plain_batch(batch))
        losses.append(float(value))
    return losses, jax.device_get(weights)


@pytest.fixture(scope="module")
def expected():
    return {uneven: plain_run(mean_loss, uneven) for uneven in (False, True)}


def furthest(left: oracle.Weights, right: oracle.Weights) -> float:
    assert left.keys() == right.keys()
    return max(float(np.abs(left[name] - right[name]).max()) for name in left)


@pytest.mark.parametrize(("sizes", "microbatches"), TABLE)
def test_any_mesh_and_microbatches_equal_plain_optax_on_one_device(expected, sizes, microbatches):
    trainer = Trainer(psdp(layout_of(*sizes), microbatches))
    for uneven in (False, True):
        losses, weights = trainer.run(uneven)
        np.testing.assert_allclose(losses, expected[uneven][0], atol=1e-5)
        assert furthest(weights, expected[uneven][1]) < 1e-5


def test_a_mean_of_microbatch_means_would_fail(expected):
    """With an uneven mask it is another loss and trains other parameters; without one it is the same."""
    losses, weights = plain_run(mean_of_means, uneven=True)
    assert abs(losses[0] - expected[True][0][0]) > 1e-3
    assert furthest(weights, expected[True][1]) > 1e-4
    assert plain_run(mean_of_means, uneven=False)[0] == pytest.approx(expected[False][0], abs=1e-5)


class Program(NamedTuple):
    """A step compiled for replica 2 x data 2 x model 2 with 4 microbatches."""

    audit: Audit
    rematerializations: list[str]
    layout: Layout


def compiled(step, layout: Layout, *arguments) -> Program:
    with captured_compiler_warnings() as warnings:
        program = jax.jit(step).lower(*arguments).compile()
    return Program(audit(program, layout.mesh), warnings.rematerializations, layout)


def compiled_psdp(optimizer: OptimizerConfig) -> Program:
    layout = layout_of(2, 2, 2)
    method = psdp(layout, 4, optimizer)
    state = fast_jit(method.init)()
    return compiled(method.step, layout, state, placed(token_batch(), layout, layout.compute))


@pytest.fixture(scope="module")
def program() -> Program:
    return compiled_psdp(ADAMW)


@pytest.fixture(scope="module")
def conventional() -> Program:
    layout = layout_of(2, 2, 2)
    run = Execution(layout=layout, loss_block=48)
    parameters = placed(small_model(), layout, layout.params)
    optimizer = ADAMW.build(parameters, STEPS).whole()
    step = conventional_step(lambda model, batch: model.loss(batch, run), optimizer, layout, microbatches=4)
    state = fast_jit(optimizer.init)(parameters)
    return compiled(step, layout, parameters, state, placed(token_batch(), layout, layout.compute))


def over_replica_in_loops(program: Program) -> list:
    return [collective for collective in program.audit.over(REPLICA) if collective.loop]


def sent_bytes(program: Program) -> float:
    """What a device sends over replica in a step, by ring algorithms."""
    return sum(collective.bytes_sent * collective.times for collective in program.audit.over(REPLICA))


SCALARS_BYTES = 64


def expected_bytes() -> Counter:
    """Bytes of a parameter's shard under `params`, a float32 each: what one reduce-scatter or all-gather carries."""
    split = dict.fromkeys((EMBED, "heads", "kv_heads", "mlp", "vocab"), 2)
    return Counter(
        4 * prod(axis.size // split.get(axis.name, 1) for axis in leaf.axes) for leaf in named_leaves(small_model())
    )


def test_nothing_crosses_replica_inside_the_microbatch_loop(program):
    assert over_replica_in_loops(program) == []
    assert not program.audit.unknown()
    assert len(program.audit.inside_loops()) > 10, "the loop is there, with collectives over data and model"
    assert {loop.times for loop in program.audit.loops()} >= {4}


def test_the_conventional_step_crosses_replica_in_every_microbatch(program, conventional):
    """The check above finds what it looks for, and this is what PSDP is for."""
    inside = over_replica_in_loops(conventional)
    assert sum(c.bytes * c.times for c in inside) >= 4 * sum(expected_bytes().elements())
    assert {collective.times for collective in inside} & {4, 8}
    assert sent_bytes(conventional) > 3.9 * sent_bytes(program), "four microbatches, four times as much"


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
        assert collective.bytes < SCALARS_BYTES, "the loss, the weights, and the norm's addends"


def test_no_permutation_and_no_rematerialization(program):
    kinds = {collective.kind for collective in program.audit.collectives}
    assert kinds == {"all-reduce", "reduce-scatter", "all-gather"}
    assert program.rematerializations == []


def test_a_state_split_the_other_way_round_would_be_permuted():
    """With (replica, data) a device's shard of the state is not a slice of its own shard of the parameters."""
    layout = layout_of(2, 2, 2)
    table = placed(small_model().embedding, layout, {EMBED: (REPLICA, "data")})
    program = jax.jit(lambda table: layout.constrain(table, layout.params)).lower(table).compile()
    assert "collective-permute" in {c.kind for c in audit(program, layout.mesh).collectives}


def test_muon_sends_over_replica_what_adamw_sends(program):
    muon = compiled_psdp(MuonConfig(schedule=ConstantSchedule()))
    assert over_replica_in_loops(muon) == []
    large = [
        Counter((c.kind, c.bytes) for c in one.audit.over(REPLICA) if c.bytes >= SCALARS_BYTES)
        for one in (muon, program)
    ]
    assert large[0] == large[1]
    assert muon.rematerializations == []


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2, 1), (8, 1, 1)])
def test_a_shard_of_the_optimizer_state_is_one_of_replica_times_data(sizes):
    replica, data, _ = sizes
    method = psdp(layout_of(*sizes), 1)
    state = fast_jit(method.init)()
    moments = [leaf for leaf in named_leaves(state.sharded) if leaf.ndim]
    assert len(moments) == 2 * len(named_leaves(method.model))
    for leaf in moments:
        over_model = prod(method.layout.mesh.shape["model"] for name in leaf.axis_names if name in TENSOR_PARALLEL)
        for shard in leaf.array.addressable_shards:
            assert shard.data.size * replica * data * over_model == leaf.array.size
    assert all(leaf.size == 1 for leaf in jax.tree.leaves(state.gathered))


def test_muon_on_a_mesh_equals_muon_on_one_device():
    config = MuonConfig(learning_rate=LEARNING_RATE, schedule=ConstantSchedule())
    one = Trainer(psdp(layout_of(1, 1, 1), 1, config)).run(True)
    eight = Trainer(psdp(layout_of(2, 2, 2), 4, config)).run(True)
    np.testing.assert_allclose(eight[0], one[0], atol=1e-5)
    assert furthest(eight[1], one[1]) < 1e-5


def test_bfloat16_compute_on_a_mesh_is_close_to_float32(expected):
    layout = layout_of(2, 2, 2)
    run = Execution(layout=layout.inside_replica(), dtype=jnp.dtype(jnp.bfloat16))
    method = replace(psdp(layout, 2), loss=lambda model, batch: model.loss(batch, run))
    losses, _ = Trainer(method).run(True)
    np.testing.assert_allclose(losses, expected[True][0], rtol=0.02)
