"""A pipelined Llama trains as its unpipelined twin does, with whatever else a run has."""

from dataclasses import dataclass, replace
from math import prod

import jax
import numpy as np
import pytest

from gregale.axes.layout import AXES, MeshConfig, make_mesh
from gregale.communication.pipeline import PipelineConfig
from gregale.cost import Audit, audit
from gregale.model.config import BalanceConfig, ComputeConfig, ExpertsConfig
from gregale.model.llama import LlamaConfig
from gregale.optim import AdamWConfig, ConstantSchedule
from gregale.programs.runtime.build import set_up
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import BatchConfig, TrainConfig
from tests.mesh.support import POSITIONS, ROWS, placed, token_batch
from tests.sent import assert_sends_as_recorded

STEPS = 2
# Of a tensor's norm. AdamW's moments after the first step are the gradients and their squares. Later gradients are
# those of parameters that AdamW has moved by lr g / (|g| + epsilon), which makes much of the rounding of a small g.
TOLERANCE = 1e-5
PLAIN = TrainConfig(
    name="twin",
    steps=STEPS,
    mesh=MeshConfig(replica=2, data=1),
    # Layers of two kinds: a stage has layers with a window and one without, under a `vmap` over stages.
    model=LlamaConfig(
        layers=4,
        hidden=32,
        heads=4,
        kv_heads=2,
        mlp=32,
        init_scale=0.2,
        sliding_window=3,
        full_layers=(1,),
        z_loss=0.01,
    ),
    compute=ComputeConfig(dtype="float32", remat="none", unroll=1, loss_block=64),
    batch=BatchConfig(size=ROWS, sequence_length=POSITIONS, microbatches=2),
    optimizer=AdamWConfig(learning_rate=1e-3, schedule=ConstantSchedule()),
)


@dataclass
class Outcome:
    setup: Setup
    losses: list[float]
    norms: list[float]
    states: list  # after each step
    audit: Audit


def trained(config: TrainConfig) -> Outcome:
    """A few steps of what `gregale train` compiles."""
    devices = jax.devices()[: prod(getattr(config.mesh, axis) for axis in AXES)]
    setup = set_up(config, 64, make_mesh(config.mesh, devices))
    state = setup.initial_state()
    stepper = setup.stepper()
    batches = [placed(token_batch(seed=step), setup.layout, setup.layout.compute) for step in range(config.steps)]
    stepper.program = jax.jit(stepper.program).lower(state, batches[0]).compile()  # donates no state
    outcome = Outcome(setup, [], [], [], audit(stepper.program, setup.layout.mesh))
    for step, batch in enumerate(batches, 1):
        state, report = stepper(state, batch, step)
        outcome.losses.append(np.asarray(report.metrics.loss).tolist())
        outcome.norms.append(np.asarray(report.metrics.grad_norm).tolist())
        outcome.states.append(jax.device_get(state))
    return outcome


def assert_states_close(found, exact) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(exact)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert np.linalg.norm(left - right) <= TOLERANCE * np.linalg.norm(right)


@pytest.fixture(scope="module")
def exact() -> Outcome:
    return trained(PLAIN)


DELAYED = PipelineConfig(repeats=2, microbatches=4, gather="per_iteration", delay_forwarding=True, remat="attention")
SHARDED = pytest.param(MeshConfig(stage=2, data=2, model=2), PipelineConfig(microbatches=4), marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("mesh", "pipeline"), [(MeshConfig(replica=2, stage=2, data=2), DELAYED), SHARDED], ids=["delayed", "sharded"]
)
def test_a_pipelined_llama_trains_as_its_twin(mesh, pipeline, exact):
    found = trained(replace(PLAIN, mesh=mesh, pipeline=pipeline))
    np.testing.assert_allclose(found.losses, exact.losses, atol=1e-5)
    np.testing.assert_allclose(found.norms, exact.norms, rtol=1e-5)
    assert_states_close(found.states[0], exact.states[0])
    assert_sends_as_recorded(found.audit)


def test_a_pipeline_of_experts_sends_as_recorded():
    balance = BalanceConfig(loss=0.1, z_loss=0.01, bias=True)
    experts = ExpertsConfig(8, 2, width=16, shared=24, shared_gate=True, balance=balance)
    pipeline, model = PipelineConfig(microbatches=4, remat="projections"), replace(PLAIN.model, experts=experts)
    found = trained(replace(PLAIN, steps=1, mesh=MeshConfig(stage=2, data=2, model=2), pipeline=pipeline, model=model))
    assert_sends_as_recorded(found.audit)
