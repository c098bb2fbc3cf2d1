"""Small PSDP steps, set up and compiled, for the tests of costs."""

from dataclasses import replace
from math import prod

import jax

from gregale.axes.layout import MeshConfig, make_mesh
from gregale.cost import Audit, audit
from gregale.cost.hlo import parse, walk
from gregale.model.config import ComputeConfig
from gregale.model.llama import LlamaConfig
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


def traced_step(setup: Setup) -> jax.stages.Traced:
    """The step that `train` runs; of DiLoCo, one in which nothing is sent or applied."""
    during = setup.method.actions(1).step_args
    return setup.stepper().program.trace(setup.abstract_state(), setup.abstract_batch, *during)


def lowered_step(setup: Setup) -> jax.stages.Lowered:
    return traced_step(setup).lower()


def lowered_for(setup: Setup, platform: str) -> str:
    """That step as it is given to the compiler of another platform, which need not be there."""
    return traced_step(setup).lower(lowering_platforms=(platform,)).as_text()


def audited(setup: Setup) -> Audit:
    """The audit of that step."""
    return audit(compiled_text(traced_step(setup)), setup.layout.mesh, known_trips(setup))


def compiled_text(step: jax.stages.Traced) -> str:
    return step.lower().compile(compiler_options=FAST).as_text() or ""


def products_of(text: str, setup: Setup) -> int:
    """The FLOPs of the products in a compiled program, of all devices together."""
    total = 0
    for site in walk(parse(text), known_trips(setup)):
        dot, computation = site.instruction, site.frame.computation
        if dot.opcode == "dot":
            contracted = (dot.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or "").split(",")
            left = computation.operand_shapes(dot)[0].sizes
            of_one = 2 * prod(dot.shapes[0].sizes) * prod(left[int(axis)] for axis in contracted if axis)
            total += of_one * prod(1 if loop.times is None else loop.times for loop in site.context.loops)
    return total * setup.layout.mesh.size
