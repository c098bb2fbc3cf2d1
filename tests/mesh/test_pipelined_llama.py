"""A pipelined Llama trains as its unpipelined twin does, with whatever else a run has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import jax
import numpy as np
import pytest

from gregale.axes.mesh import MeshConfig, make_mesh
from gregale.communication.pipeline_config import PipelineConfig
from gregale.model.config import ComputeConfig, LlamaConfig
from gregale.optim import AdamWConfig, ConstantSchedule
from gregale.programs.setup import set_up
from gregale.services.config import BatchConfig, TrainConfig
from tests.mesh.support import FAST_TO_COMPILE, POSITIONS, ROWS, placed, token_batch

STEPS = 2
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
    state: object


@cache
def trained(config: TrainConfig) -> Outcome:
    """A few steps of what `gregale train` compiles."""
    setup = set_up(config, 64, make_mesh(config.mesh, jax.devices()))
    state, stepper = setup.initial_state(), setup.stepper()
    stepper.program = jax.jit(stepper.program, compiler_options=FAST_TO_COMPILE)
    losses, norms = [], []
    for step in range(1, config.steps + 1):
        batch = placed(token_batch(seed=step), setup.layout, setup.layout.compute)
        state, report = stepper(state, batch, step)
        losses.append(np.asarray(report.metrics.loss).tolist())
        norms.append(np.asarray(report.metrics.grad_norm).tolist())
    return Outcome(losses, norms, jax.device_get(state))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pipeline": PipelineConfig(repeats=1, microbatches=8, delay_forwarding=True, remat="attention")},
        {"mesh": MeshConfig(stage=2, data=2, model=2), "pipeline": PipelineConfig(repeats=2, gather="once")},
    ],
    ids=["repeats", "delayed", "tensor-parallel"],
)
def test_a_pipelined_llama_trains_as_its_twin(changes):
    found, exact = trained(replace(PIPELINED, **changes)), trained(PLAIN)
    np.testing.assert_allclose(found.losses, exact.losses, atol=1e-5)
    np.testing.assert_allclose(found.norms, exact.norms, rtol=1e-5)
    assert jax.tree.structure(found.state) == jax.tree.structure(exact.state)
    for left, right in zip(jax.tree.leaves(found.state), jax.tree.leaves(exact.state), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)
