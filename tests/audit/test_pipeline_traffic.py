"""The closed form of what a pipelined step sends, beside what the compiled program sends."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import jax
import pytest

from gregale.audit.step import CPU
from gregale.axes.mesh import MeshConfig, make_mesh
from gregale.communication.pipeline_config import PipelineConfig
from gregale.programs.plan_shapes import step_transfers
from gregale.programs.setup import set_up
from gregale.services.config import BatchConfig, TrainConfig
from tests.audit.steps import COMPUTE, MODEL, audited

# Mesh, pipeline, layers, and changes of the compute configuration or the model.
SPREAD = {
    "tensor parallelism": (MeshConfig(stage=2, data=2, model=2), PipelineConfig(repeats=2), 4, {}, {}),
    "two layers a stage": (
        MeshConfig(stage=2, data=2, model=2),
        PipelineConfig(remat="projections", delay_forwarding=True),
        4,
        {"dtype": "bfloat16"},
        {"qk_norm": True, "attention_bias": True, "tied_head": True},
    ),
    "per iteration": (
        MeshConfig(replica=2, stage=2, data=2),
        PipelineConfig(microbatches=4, gather="per_iteration"),
        2,
        {},
        {},
    ),
    "once, no FSDP in a stage": (MeshConfig(replica=2, stage=4), PipelineConfig(gather="once"), 4, {}, {}),
}


def small_pipelined(name: str):
    mesh, pipeline, layers, compute, model = SPREAD[name]
    config = TrainConfig(
        name="small",
        steps=10,
        mesh=mesh,
        pipeline=pipeline,
        model=replace(MODEL, layers=layers, **model),
        compute=replace(COMPUTE, **compute),
        batch=BatchConfig(size=32, sequence_length=16, microbatches=2),
    )
    return set_up(config, 257, make_mesh(mesh, jax.devices()))


@pytest.mark.parametrize("name", SPREAD)
def test_closed_form_is_what_the_compiled_step_sends(name):
    setup = small_pipelined(name)
    kinds, expected = Counter(), Counter()
    for each in audited(setup).collectives:
        if each.axes:
            kinds[each.kind, each.axes] += each.bytes * each.times
    for each in step_transfers(setup, CPU):
        expected[each.kind, each.axes] += each.bytes * each.times
    assert kinds == expected
