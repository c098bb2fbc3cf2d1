"""A pipelined Llama trains as its unpipelined twin does, with whatever else a run has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import jax
import numpy as np
import pytest

from gregale.audit import Audit, audit
from gregale.audit.traffic import bytes_by_axes
from gregale.axes.layout import REPLICA
from gregale.axes.mesh import AXES, MeshConfig, make_mesh
from gregale.codecs.config import ReduceConfig
from gregale.communication.pipeline_config import PipelineConfig
from gregale.methods.config import DilocoConfig, StreamingDilocoConfig, SyncConfig
from gregale.methods.psdp import Psdp
from gregale.model.config import ComputeConfig, LlamaConfig
from gregale.optim import AdamWConfig, ConstantSchedule, SgdConfig
from gregale.programs.plan_messages import psdp_messages
from gregale.programs.setup import Setup, set_up
from gregale.services.config import BatchConfig, TrainConfig
from tests.mesh.support import FAST_TO_COMPILE, POSITIONS, ROWS, placed, token_batch

STEPS = 2
# Of a tensor's norm. AdamW's moments after the first step are the gradients and their squares. Later gradients are
# those of parameters that AdamW has moved by lr g / (|g| + epsilon), which makes much of the rounding of a small g.
TOLERANCE = 1e-5
PLAIN = TrainConfig(
    name="twin",
    steps=STEPS,
    mesh=MeshConfig(replica=2),
    model=LlamaConfig(layers=4, hidden=32, heads=4, kv_heads=2, mlp=32, qk_norm=True, init_scale=0.2),
    compute=ComputeConfig(dtype="float32", remat="none", unroll=1, loss_block=64),
    batch=BatchConfig(size=ROWS, sequence_length=POSITIONS, microbatches=2),
    optimizer=AdamWConfig(learning_rate=1e-3, schedule=ConstantSchedule()),
)
STAGES = MeshConfig(replica=2, stage=2, data=2)
PIPELINED = replace(PLAIN, mesh=STAGES, pipeline=PipelineConfig(repeats=2, microbatches=4))


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
    stepper.program = jax.jit(stepper.program, compiler_options=FAST_TO_COMPILE)
    compiled = stepper.program.lower(state, batches[0], *setup.method.actions(1).during).compile()
    outcome = Outcome(setup, [], [], [], audit(compiled, setup.layout.mesh))
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


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pipeline": PipelineConfig(repeats=1, microbatches=4, delay_forwarding=True, remat="attention")},
        {"mesh": MeshConfig(stage=2, data=2, model=2), "pipeline": PipelineConfig(repeats=2, gather="once")},
    ],
    ids=["repeats", "delayed", "tensor-parallel"],
)
def test_a_pipelined_llama_trains_as_its_twin(changes, exact):
    found = trained(replace(PIPELINED, **changes))
    np.testing.assert_allclose(found.losses, exact.losses, atol=1e-5)
    np.testing.assert_allclose(found.norms, exact.norms, rtol=1e-5)
    assert_states_close(found.states[0], exact.states[0])
    assert [each for each in found.audit.over(REPLICA) if each.loop] == [], "nothing crosses replica but once a step"
    assert not found.audit.unknown()
    in_loops = {(each.kind, each.axes) for each in found.audit.collectives if each.loop and "stage" in each.axes}
    assert ("collective-permute", ("stage",)) in in_loops


@pytest.mark.parametrize(
    "sync",
    [DilocoConfig(period=2), StreamingDilocoConfig(period=3, fragments=3, delay=1, alpha=0.5)],
    ids=["diloco", "streaming"],
)
def test_replicas_that_diloco_joins_have_pipelines(sync: SyncConfig):
    """Each replica's pipeline is its own; both methods join something after step 2.

    Streaming joins layers 1 and 3 then: fragments count layers, not stages.
    """
    batch = replace(PLAIN.batch, microbatches=1)
    joined = replace(PLAIN, sync=sync, batch=batch, optimizer=SgdConfig(learning_rate=0.1))
    pipelined = replace(joined, mesh=MeshConfig(replica=2, stage=2), pipeline=PipelineConfig(repeats=2))
    found, exact = trained(pipelined), trained(joined)
    np.testing.assert_allclose(found.losses, exact.losses, atol=1e-5)
    np.testing.assert_allclose(found.norms, exact.norms, rtol=1e-5)
    assert_states_close(found.states[-1], exact.states[-1])
    assert found.audit.over(REPLICA) == ()


def test_quantised_averages_of_pipelines():
    """The twin splits `embed` over data 4 as the pipeline does over data 2 x stage 2, so both quantise the same blocks.

    A gradient that differs in its last bits may be given the next code, which changes it by one step of its block: less
    than 1/8 of the block's largest value, and feedback sends that later. The learning rate is 0.001 and AdamW moves a
    value by about that much, so even if one gradient in a thousand is coded otherwise, the loss changes by much less
    than the 1e-4 that is allowed in the second step.
    """
    four_bits = ReduceConfig(codec="int4", second_leg="int4")
    found = trained(replace(PIPELINED, reduce=four_bits))
    exact = trained(replace(PLAIN, mesh=MeshConfig(replica=2, data=4), reduce=four_bits))
    np.testing.assert_allclose(found.losses[0], exact.losses[0], atol=1e-5)
    np.testing.assert_allclose(found.losses[1], exact.losses[1], atol=1e-4)
    np.testing.assert_allclose(found.norms, exact.norms, rtol=1e-3)
    over_replica = found.audit.over(REPLICA)
    assert {(each.dtype, each.axes, each.loop) for each in over_replica} == {("u8", (REPLICA,), ())}
    assert isinstance(found.setup.method, Psdp)
    expected = bytes_by_axes(psdp_messages(found.setup.method) or [])[REPLICA,]
    assert sum(each.bytes * (each.times or 0) for each in over_replica) == expected
