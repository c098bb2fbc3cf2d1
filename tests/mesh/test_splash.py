"""Attention's kernels on a mesh: under replicas, stages and heads that are split, each device runs its own."""

from collections import Counter

import jax
import pytest
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from gregale.communication.pipeline import PipelineConfig, pipelined_execution
from gregale.communication.reduce import accumulate
from gregale.model.execution import Execution
from gregale.model.kernels.operations import PLAIN, Kernels
from gregale.model.llama import LlamaConfig
from tests.mesh.support import assert_trees_close, layout_of, placed, small_model, token_batch
from tests.model.kernels.tpu.test_splash import SPLASH

MODEL = LlamaConfig(layers=2, hidden=32, heads=4, kv_heads=2, mlp=32, sliding_window=9, init_scale=0.2)


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


def running_kernels(jaxpr) -> Counter:
    """Kernels by name, the beginning of it, whose results are used."""
    used = {id(var) for equation in jaxpr.eqns for var in equation.invars} | {id(var) for var in jaxpr.outvars}
    found = Counter()
    for equation in jaxpr.eqns:
        if equation.primitive.name != "pallas_call":
            for inner in jaxprs_in_params(equation.params):
                found += running_kernels(inner)
        elif any(id(var) in used for var in equation.outvars):
            found["_".join(equation.params["name"].split("_")[:3])] += 1
    return found


@pytest.mark.parametrize(("remat", "passes"), [("full", 2), ("context", 1), ("context_offload", 1), ("none", 1)])
def test_what_context_saves_spares_the_second_forward_pass(remat, passes):
    layout = layout_of()
    run = Execution(layout=layout.inside_replica(), kernels=SPLASH, remat=remat)
    gradient = jax.grad(lambda model, batch: model.loss(batch, run)[0])
    traced = jax.make_jaxpr(gradient)(small_model(MODEL), token_batch(rows=2)).jaxpr
    used, _ = dce_jaxpr(traced, [True] * len(traced.outvars))
    assert running_kernels(used) == {"splash_mha_fwd": passes, "splash_mha_fused": 1}


def test_gradients_on_a_mesh_are_those_of_the_plain_form():
    """Replicas, stages, and a split of heads."""
    exact = sums(PLAIN, {"replica": 2, "data": 2, "model": 2}, None)
    found = sums(SPLASH, {"replica": 2, "stage": 2, "model": 2}, PipelineConfig(remat="context"))
    assert_trees_close(found, exact, atol=1e-5, rtol=1e-5)
