"""Models of which some layers have a sliding window, compiled for TPUs with all options, on a machine without a TPU."""

from __future__ import annotations

import pytest

from gregale.axes.mesh import MeshConfig
from gregale.model.config import ComputeConfig, GemmaConfig
from gregale.programs.plan.devices import topology_target
from gregale.programs.plan.step import MEMORY, plan_step
from gregale.runs.config import BatchConfig, TrainConfig

pytestmark = pytest.mark.usefixtures("compiled_anew")

MODEL = GemmaConfig(
    layers=4, hidden=256, heads=2, kv_heads=1, mlp=256, vocabulary=512, sliding_window=64, full_layers=(1, 3)
)


@pytest.mark.parametrize("slices", [1, 2])
def test_mixed_windows_compile_with_the_fast_options(slices):
    """Their compiler ends itself over a branch in a loop of which it pipelines the sums; so there is none."""
    config = TrainConfig(
        name="mixed",
        steps=1,
        mesh=MeshConfig(replica=slices),
        model=MODEL,
        compute=ComputeConfig(dtype="bfloat16", remat="full"),
        batch=BatchConfig(size=8 * slices, sequence_length=256, microbatches=1),
    )
    plan = plan_step(config, 512, topology_target("v5e:2x2", slices, None), MEMORY)
    assert plan.setup.compiler_options["xla_tpu_enable_ici_ar_pipelining"]
    assert "splash_mha_fwd" in plan.step.text
    assert " conditional(" not in plan.step.text
    assert {each.times for each in plan.step.audit.inside_loops()} <= {1, 2}, "two patterns of two layers"
