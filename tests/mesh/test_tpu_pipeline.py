"""Transfers between stages in the TPU compiler's schedule, on a machine without a TPU."""

from functools import cache

import haliax as hax
import jax
import pytest
from haliax import Axis, NamedArray
from jax.experimental import topologies

from gregale.axes.layout import BATCH, LAYERS, Layout, MeshConfig, make_mesh, standard_layout
from gregale.communication.pipeline import IO, OUTPUTS, Pipeline, Schedule, pipelined
from gregale.cost import audit
from gregale.cost.hlo import Computation, Instruction, parse

pytestmark = pytest.mark.usefixtures("compiled_anew")  # plans tell what the compiler warns of

STAGES, MICROBATCHES, REPEATS, PER_STAGE, ROWS = 2, 4, 2, 2, 512
Embed, Wide = Axis("embed", 256), Axis("wide", 1024)


@pytest.fixture(scope="module")
def layout() -> Layout:
    devices = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
    return standard_layout(make_mesh(MeshConfig(stage=STAGES, data=2), devices))


def layer(x: NamedArray, weights: dict, extras: dict) -> tuple[NamedArray, None]:
    del extras
    return x + hax.dot(hax.tanh(hax.dot(x, weights["up"], axis="embed")), weights["down"], axis="wide"), None


@pytest.fixture(scope="module")
def program(layout):
    """A function from forwarding to the text of the compiled gradients."""

    @cache
    def compiled(forwarding: int) -> str:
        pipeline = Pipeline(Schedule(STAGES, MICROBATCHES, REPEATS, forwarding), layout)
        Layers, Rows = Axis(LAYERS, STAGES * REPEATS * PER_STAGE), Axis(BATCH, 2 * MICROBATCHES * ROWS)

        def loss(weights, inputs):
            return hax.sum(hax.square(pipelined(layer, weights, inputs, {}, pipeline)[0])).scalar()

        axes = {"up": (Layers, Embed, Wide), "down": (Layers, Wide, Embed)}
        weights = jax.eval_shape(lambda: {name: hax.zeros(each) for name, each in axes.items()})
        inputs = jax.eval_shape(lambda: hax.zeros((Rows, Embed)))
        abstract = layout.abstract(weights, layout.params), layout.abstract(inputs, layout.compute)
        return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*abstract).compile().as_text() or ""

    return compiled


def behind_layers(text: str, what: str, backward: bool) -> set[bool]:
    """For the transfers of `what` in the loops over microbatches: whether the loop over layers runs meanwhile."""
    found = set()
    for computation in parse(text).computations.values():
        for instruction in computation.instructions.values():
            name = instruction.op_name
            is_inside = name.count("/while/body") == 2 and ("transpose(" in name) == backward
            if instruction.opcode == "collective-permute-start" and f"/{what}/" in name and is_inside:
                found.add("while" in meanwhile(computation, instruction))
    return found


def meanwhile(computation: Computation, start: Instruction) -> list[str]:
    """The operations that are scheduled between the start of a transfer and its end."""
    names = list(computation.instructions)
    between = names[names.index(start.name) + 1 :]
    end = next(place for place, name in enumerate(between) if start.name in computation.instructions[name].operands)
    return [computation.instructions[name].opcode for name in between[:end]]


@pytest.mark.parametrize("forwarding", [1, 2])
def test_stages_hand_on_by_asynchronous_permutes_and_inputs_move_up_behind_the_layers(program, layout, forwarding):
    between_stages = [each for each in audit(program(forwarding), layout.mesh).over("stage") if each.loop]
    assert len(between_stages) >= 4
    assert {(each.kind, each.is_async) for each in between_stages} == {("collective-permute", True)}
    for backward in (False, True):
        assert behind_layers(program(forwarding), IO, backward) == {True}


def test_only_delayed_outputs_are_sent_behind_the_layers(program):
    """Others are waited for in the forward pass; in the backward pass the layers are recomputed meanwhile."""
    assert behind_layers(program(2), OUTPUTS, backward=False) == {True}
    assert behind_layers(program(2), OUTPUTS, backward=True) == {True}
    assert behind_layers(program(1), OUTPUTS, backward=False) == {False}
    assert behind_layers(program(1), OUTPUTS, backward=True) == {True}
