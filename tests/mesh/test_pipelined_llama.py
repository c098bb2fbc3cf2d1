"""A pipelined Llama trains as its unpipelined twin does, with whatever else a run has."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

from gregale.audit import Audit, audit
from gregale.axes.layout import REPLICA
from gregale.axes.mesh import MeshConfig, make_mesh
from gregale.communication.pipeline_config import PipelineConfig
from gregale.methods.config import StreamingDilocoConfig
from gregale.model.config import ComputeConfig, LlamaConfig
from gregale.optim import AdamWConfig, ConstantSchedule
from gregale.programs.setup import set_up
from gregale.services.config import BatchConfig, TrainConfig
from tests.mesh.support import FAST_TO_COMPILE, POSITIONS, ROWS, placed, token_batch

STEPS = 2
# Of a tensor's norm. AdamW's moments after the first step are the gradients and their squares. Later gradients are
# those of parameters that AdamW has moved by lr g / (|g| + epsilon), which makes much of the rounding of a small g.
TOLERANCE = 1e-5
PLAIN = TrainConfig(
    name="twin",
    steps=STEPS,
    mesh=MeshConfig(replica=2, data=4),
    model=LlamaConfig(layers=4, hidden=32, heads=4, kv_heads=2, mlp=32, qk_norm=True, init_scale=0.2),
    compute=ComputeConfig(dtype="float32", remat="none", unroll=1, loss_block=64),
    batch=BatchConfig(size=ROWS, sequence_length=POSITIONS, microbatches=2),
    optimizer=AdamWConfig(learning_rate=1e-3, schedule=ConstantSchedule()),
)
STAGES = MeshConfig(replica=2, stage=2, data=2)
PIPELINED = replace(PLAIN, mesh=STAGES, pipeline=PipelineConfig(repeats=2, microbatches=4))


@dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    states: list  # after each step
    audit: Audit


def trained(config: TrainConfig) -> Outcome:
    """A few steps of what `gregale train` compiles."""
    setup = set_up(config, 64, make_mesh(config.mesh, jax.devices()))
    state = setup.initial_state()
    stepper = setup.stepper()
    batches = [placed(token_batch(seed=step), setup.layout, setup.layout.compute) for step in range(config.steps)]
    stepper.program = jax.jit(stepper.program, compiler_options=FAST_TO_COMPILE)
    compiled = stepper.program.lower(state, batches[0], *setup.method.actions(1).during).compile()
    outcome = Outcome([], [], [], audit(compiled, setup.layout.mesh))
    for step, batch in enumerate(batches, 1):
        state, report = stepper(state, batch, step)
        outcome.losses.append(np.asarray(report.metrics.loss).tolist())
        outcome.norms.append(np.asarray(report.metrics.grad_norm).tolist())
        outcome.states.append(jax.device_get(state))
    return outcome


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
    assert jax.tree.structure(found.states) == jax.tree.structure(exact.states)
    for left, right in zip(jax.tree.leaves(found.states[0]), jax.tree.leaves(exact.states[0]), strict=True):
        assert np.linalg.norm(left - right) <= TOLERANCE * np.linalg.norm(right)
    assert [each for each in found.audit.over(REPLICA) if each.loop] == [], "nothing crosses replica but once a step"
    assert not found.audit.unknown()
    in_loops = {(each.kind, each.axes) for each in found.audit.collectives if each.loop and "stage" in each.axes}
    assert ("collective-permute", ("stage",)) in in_loops


def test_replicas_that_streaming_diloco_joins_have_pipelines():
    """Fragments count layers, not stages; each replica's pipeline is its own."""
    joined = replace(PLAIN, steps=3, sync=StreamingDilocoConfig(period=2, fragments=2, delay=0))
    found, exact = trained(replace(joined, mesh=STAGES, pipeline=PIPELINED.pipeline)), trained(joined)
    np.testing.assert_allclose(found.losses, exact.losses, atol=1e-5)
    np.testing.assert_allclose(found.norms, exact.norms, rtol=1e-4)
    assert found.audit.over(REPLICA) == ()
