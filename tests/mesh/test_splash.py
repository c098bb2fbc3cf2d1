"""Attention's kernels on a mesh: under replicas, stages and heads that are split, each device runs its own."""

from __future__ import annotations

import jax
import pytest

from gregale.communication.accumulate import accumulate
from gregale.communication.pipeline.config import PipelineConfig, pipelined_execution
from gregale.model.config import LlamaConfig
from gregale.model.execution import Execution
from gregale.model.kernels.kernels import Kernels
from gregale.model.kernels.plain import PLAIN
from tests.mesh.support import assert_trees_close, layout_of, placed, small_model, token_batch
from tests.model.kernels.tpu.test_splash import SPLASH

MODEL = LlamaConfig(layers=2, hidden=32, heads=4, kv_heads=2, mlp=32, sliding_window=9, init_scale=0.2)
PIPELINE = PipelineConfig(remat="context")


def sums(kernels: Kernels, sizes: dict[str, int], pipeline: PipelineConfig | None):
    """Each replica's loss and gradients of a batch with two documents a row."""
    layout = layout_of(**sizes)
    run = Execution(layout=layout.inside_replica(), kernels=kernels, remat="context")
    run = run if pipeline is None else pipelined_execution(pipeline, run)
    model = placed(small_model(MODEL), layout, layout.params)
    batch = placed(token_batch(rows=8), layout, layout.compute)

    def loss(model, batch):
        return model.loss(batch, run)

    return jax.device_get(
        jax.jit(lambda model, batch: accumulate(loss, model, batch, layout, 1, lambda x: x))(model, batch)
    )


@pytest.mark.parametrize(
    ("sizes", "pipeline"),
    [({"replica": 2, "data": 2, "model": 2}, None), ({"replica": 2, "stage": 2, "model": 2}, PIPELINE)],
    ids=["scanned", "pipelined"],
)
def test_gradients_on_a_mesh_are_those_of_the_plain_form(sizes, pipeline):
    assert_trees_close(sums(SPLASH, sizes, pipeline), sums(PLAIN, sizes, pipeline), atol=1e-5, rtol=1e-5)
