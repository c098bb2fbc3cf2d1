"""Small PSDP steps, set up and compiled, for the tests of the closed forms."""

from dataclasses import replace
from math import prod

import jax

from gregale.axes.layout import MeshConfig, make_mesh
from gregale.cost import Audit, audit
from gregale.cost.estimate import StepShape
from gregale.model.config import ComputeConfig
from gregale.model.llama import LlamaConfig
from gregale.programs.plan.estimates import abstract_batch, step_shape
from gregale.programs.plan.step import known_trips
from gregale.programs.runtime.build import set_up
from gregale.programs.runtime.setup import Setup
from gregale.runs.config import BatchConfig, TrainConfig

MODEL = LlamaConfig(layers=3, hidden=32, heads=8, kv_heads=4, mlp=64, vocabulary=320)
COMPUTE = ComputeConfig(dtype="float32", unroll=1, loss_block=24)
# Partitioning is the same; only the code of each device is not optimised.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def small_setup(sizes: tuple[int, ...], microbatches: int = 2, compute=None, model=None, others=None) -> Setup:
    """A step on a mesh (replica, data, model[, stage]).

    `compute` and `model` change fields of these parts of the small configuration, `others` those of all of it.
    """
    names = dict(zip(("replica", "data", "model", "stage"), sizes, strict=False))
    config = TrainConfig(
        name="small",
        steps=10,
        mesh=MeshConfig(**names),
        model=replace(MODEL, **(model or {})),
        compute=replace(COMPUTE, **(compute or {})),
        batch=BatchConfig(size=32, sequence_length=16, microbatches=microbatches),
    )
    config = replace(config, **(others or {}))
    return set_up(config, 257, make_mesh(config.mesh, jax.devices()[: prod(sizes)]))


def small_step(*arguments, **changes) -> StepShape:
    """The shape of a step whose attention has no kernel."""
    return replace(step_shape(small_setup(*arguments, **changes)), scores=True)


def lowered_step(setup: Setup) -> jax.stages.Lowered:
    """The step that `train` runs; of DiLoCo, one in which nothing is sent or applied."""
    during = setup.method.actions(1).step_args
    return setup.stepper().program.lower(setup.abstract_state(), abstract_batch(setup), *during)


def lowered_for(setup: Setup, platform: str) -> str:
    """That step as it is given to the compiler of another platform, which need not be there."""
    during = setup.method.actions(1).step_args
    traced = setup.stepper().program.trace(setup.abstract_state(), abstract_batch(setup), *during)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def audited(setup: Setup) -> Audit:
    """The audit of that step."""
    return audit(lowered_step(setup).compile(compiler_options=FAST), setup.layout.mesh, known_trips(setup))


def flops_of(jaxpr) -> int:
    """Multiply-adds of a traced program's matrix products, twice; loops counted as often as they run.

    Loops that decide themselves count 0: in a step only the loss has one, which in practice never runs.
    """
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            contracted = equation.params["dimension_numbers"][0][0]
            shape = equation.invars[0].aval.shape
            total += 2 * equation.outvars[0].aval.size * prod(shape[axis] for axis in contracted)
        times = {"scan": equation.params.get("length"), "while": 0}.get(equation.primitive.name, 1)
        for inner in jax.core.jaxprs_in_params(equation.params):
            total += times * flops_of(inner)
    return total
