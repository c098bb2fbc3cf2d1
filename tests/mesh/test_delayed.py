"""PSDP with delayed updates on eight devices: equal to plain optax that applies old gradients, and what it sends."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gregale.audit import Audit, audit
from gregale.axes.layout import REPLICA
from gregale.methods.delayed import Delayed
from gregale.training.state import abstract_state, initial_state
from gregale.training.stepper import Stepper
from tests.mesh.support import layout_of, named_leaves, placed, token_batch
from tests.mesh.test_psdp import (
    MOVEMENT_TOLERANCE,
    expected_bytes,
    first_weights,
    furthest,
    mean_loss,
    plain_adamw,
    plain_arrays,
    psdp,
    relative_errors,
)
from tests.model import oracle

pytestmark = pytest.mark.usefixtures("compiled_anew")  # plans tell what the compiler warns of

STEPS = 4


class Run(NamedTuple):
    losses: list[float]
    norms: list[float]  # of the gradient that a step averages
    weights: oracle.Weights


def batches():
    return [token_batch(seed=seed) for seed in range(STEPS)]


def oracle_run(delay: int) -> Run:
    """Plain optax on one device in float64: step t makes an update of g_{t-1}, which is applied in step t - 1 + d."""
    first = first_weights()
    gradient = jax.jit(jax.value_and_grad(mean_loss))
    with jax.enable_x64(True):
        weights = {name: jnp.asarray(array, jnp.float64) for name, array in first.items()}
        state, losses, norms = plain_adamw().init(weights), [], []
        waiting, updates = None, None
        for batch in batches():
            value, new = gradient(weights, oracle.plain_batch(batch))
            losses.append(float(value))
            norms.append(0.0 if waiting is None else float(optax.global_norm(waiting)))
            made: Any = None
            if waiting is not None:
                made, state = plain_adamw().update(waiting, state, weights)
            waiting = new
            due, updates = (made, None) if delay == 1 else (updates, made)
            weights = weights if due is None else optax.apply_updates(weights, due)
        return Run(losses, norms, jax.device_get(weights))


class Trained:
    """A delayed method, compiled once for replica 2 x data 2 x model 2 with two microbatches."""

    def __init__(self, delay: int):
        layout = layout_of(2, 2, 2)
        self.method = Delayed(psdp(layout, 2), delay)
        stepper = Stepper(self.method, self.method.inner.model)
        abstract = layout.abstract(token_batch(), layout.compute)
        self.program: Any = stepper.program.lower(abstract_state(self.method, self.method.inner.model), abstract)
        self.program = self.program.compile()
        self.audit: Audit = audit(self.program, layout.mesh)

    def start(self):
        return initial_state(self.method, lambda: self.method.inner.model)

    def step(self, state, batch):
        layout = self.method.layout
        return self.program(state, placed(batch, layout, layout.compute))


@pytest.fixture(scope="module", params=[1, 2])
def trained(request) -> Trained:
    return Trained(request.param)


def test_equals_plain_optax_that_applies_old_gradients(trained):
    exact, state, losses, norms = oracle_run(trained.method.delay), trained.start(), [], []
    for batch in batches():
        state, report = trained.step(state, batch)
        losses.append(float(report.metrics.loss))
        norms.append(float(report.metrics.grad_norm))
        assert bool(report.metrics.finite)
    np.testing.assert_allclose(losses, exact.losses, atol=1e-5)
    np.testing.assert_allclose(norms, exact.norms, rtol=1e-5)
    weights = plain_arrays(trained.method.trained(state.method))
    assert furthest(weights, exact.weights) < 1e-5
    moved, wanted = ({name: each[name] - first_weights()[name] for name in each} for each in (weights, exact.weights))
    assert max(relative_errors(moved, wanted).values()) < MOVEMENT_TOLERANCE
    other = oracle_run(3 - trained.method.delay)
    assert furthest(weights, other.weights) > 1e-4, "the other delay trains other parameters"


def test_sends_over_replica_what_psdp_sends_outside_of_the_loop(trained):
    over = trained.audit.over(REPLICA)
    assert [each for each in over if each.loop] == []
    for kind in ("reduce-scatter", "all-gather"):
        assert Counter(each.bytes for each in over if each.kind == kind) == expected_bytes()
    assert {each.kind for each in over} == {"reduce-scatter", "all-gather", "all-reduce"}
    assert {each.kind for each in trained.audit.collectives} == {"reduce-scatter", "all-gather", "all-reduce"}


def test_a_step_that_is_not_finite_changes_nothing(trained):
    """What waits goes on waiting, and is applied in the steps after it."""
    good, bad = token_batch(), token_batch()
    bad["loss_mask"] = hax.named(np.full(bad["loss_mask"].array.shape, np.inf, np.float32), bad["loss_mask"].axes)
    undisturbed, _ = trained.step(trained.start(), good)
    first, state = jax.device_get(undisturbed.method), undisturbed
    assert float(first.weight) > 0
    state, report = trained.step(state, bad)
    assert not bool(report.metrics.finite)
    assert int(report.skipped) == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.method), first)
    weights = plain_arrays(trained.method.trained(state.method))
    for _ in range(trained.method.delay):
        state, report = trained.step(state, good)
        assert bool(report.metrics.finite)
    assert furthest(plain_arrays(trained.method.trained(state.method)), weights) > 0


def test_what_waits_lies_in_shards(trained):
    state = trained.start().method
    layout = trained.method.layout
    for leaf in named_leaves(state.sums):
        assert leaf.axis_names[0] == REPLICA
        assert leaf.array.sharding.is_equivalent_to(layout.sharding(leaf.axes, layout.params), leaf.ndim)
    for leaf in named_leaves(state.updates):
        assert leaf.array.sharding.is_equivalent_to(layout.sharding(leaf.axes, layout.opt_state), leaf.ndim)
    assert (state.updates is None) == (trained.method.delay == 1)
