"""What the compiled pipeline sends: weights over `data` once a repeat, activations over `stage`, else nothing."""

from collections import Counter
from functools import cache

import haliax as hax
import jax
import pytest
from haliax import Axis

from gregale.axes.layout import BATCH
from gregale.communication.pipeline import DATA, LAYER, STAGE, Fixed, Schedule, Stages, loop_layout
from gregale.cost import Audit, audit
from tests.communication.pipeline.test_stack import (
    Embed,
    Out,
    Position,
    arguments_of,
    assert_equals_plain,
    loss_of,
    pipeline_of,
    stack_of,
    toy_layer,
)
from tests.cost.warnings import rematerializations
from tests.mesh.support import layout_of

pytestmark = pytest.mark.usefixtures("compiled_anew")  # plans tell what the compiler warns of

S, M, R, F, PER_STAGE = 4, 8, 3, 2, 2
SCHEDULE = Schedule(S, M, R, F)
# Bytes of one slot of the toy's matrix and bias on a device: PER_STAGE layers, float32.
MATRIX, BIAS = 4 * PER_STAGE * Embed.size * Out.size, 4 * PER_STAGE * Embed.size


@cache
def audited(gather: str, gradients: bool) -> Audit:
    """The audit of a program; the numbers of one with gradients are those of the plain loop."""
    pipeline = pipeline_of(S, M, R, F, gather=gather)
    loss, arguments = loss_of(stack_of(pipeline)), arguments_of(pipeline, PER_STAGE)
    step = loss if gradients else lambda *arguments: stack_of(pipeline)(*arguments[:3])
    with rematerializations() as warnings:
        program = jax.jit(step).lower(*arguments).compile()
    assert warnings == []
    if gradients:
        assert_equals_plain(program(*arguments), S * R * PER_STAGE, 4 * M)
    return audit(program, pipeline.layout.mesh)


def times(found: Audit, kind: str, axis: str) -> Counter:
    """How often collectives of a kind run over exactly one mesh axis, by their bytes."""
    counts: Counter = Counter()
    for collective in found.collectives:
        if collective.kind == kind and collective.axes == (axis,):
            counts[collective.bytes] += collective.times or 0
    return counts


def test_weights_are_gathered_once_a_repeat():
    assert times(audited("per_repeat", False), "all-gather", "data") == {MATRIX: R, BIAS: R}
    whole = audited("per_repeat", True)
    assert times(whole, "all-gather", "data") == {MATRIX: 2 * R, BIAS: 2 * R}, "R forward and R backward"
    assert times(whole, "reduce-scatter", "data") == {MATRIX: R, BIAS: R}
    for collective in whole.collectives:
        if collective.kind in ("all-gather", "reduce-scatter") and collective.axes == ("data",):
            assert [loop.times for loop in collective.loops] == [R], "in the loop over repeats, not over microbatches"


def test_per_iteration_gathers_them_in_every_iteration():
    """XLA moves the gathers of the drain's iterations out of that loop, where the window stays the same."""
    gathers = M * R + 1
    assert times(audited("per_iteration", False), "all-gather", "data") == {MATRIX: gathers, BIAS: gathers}
    whole = audited("per_iteration", True)
    assert times(whole, "all-gather", "data") == {MATRIX: 2 * gathers, BIAS: 2 * gathers}
    T = SCHEDULE.iterations
    assert times(whole, "reduce-scatter", "data") == {MATRIX: T, BIAS: T}


def test_once_gathers_all_repeats_before_the_first():
    whole = audited("once", True)
    assert times(whole, "all-gather", "data") == {R * MATRIX: 1, R * BIAS: 1}
    assert times(whole, "reduce-scatter", "data") == {R * MATRIX: 1, R * BIAS: 1}


def test_two_transfers_between_stages_an_iteration():
    """The outputs and a column of the inputs, in T iterations, and their cotangents back in as many."""
    row = 4 * Position.size * Embed.size  # float32 [position, embed]
    T = SCHEDULE.iterations
    assert times(audited("per_repeat", False), "collective-permute", "stage") == {2 * row: 2 * T}
    assert times(audited("per_repeat", True), "collective-permute", "stage") == {2 * row: 4 * T}


def test_nothing_else_is_sent():
    """Rows go in and out where they are; weights and gradients change between rows' and stages' order of devices."""
    found = audited("per_repeat", True)
    assert not found.unknown()
    kinds = {("all-gather", ("data",)), ("reduce-scatter", ("data",)), ("collective-permute", ("stage",))}
    rest = Counter((c.kind, c.dtype, c.axes, c.times) for c in found.collectives if (c.kind, c.axes) not in kinds)
    assert rest == {
        ("all-to-all", "f32", ("stage",), 1): 4,  # matrix and bias, there and back
        ("all-gather", "s32", ("stage",), 1): 2,  # positions and segments
        ("all-reduce", "f32", ("stage", "data"), 1): 1,  # the loss
        ("all-reduce", "f32", ("data",), 1): 1,  # the layers' sums over rows
        ("all-gather", "f32", ("stage",), 1): 1,
    }


@cache
def dots(repeats: int) -> int:
    pipeline = pipeline_of(2, 2, repeats)
    program = jax.jit(loss_of(stack_of(pipeline))).lower(*arguments_of(pipeline, 1)).compile()
    return (program.as_text() or "").count(" dot(")


def test_the_program_does_not_grow_with_repeats():
    assert dots(2) == dots(8) > 0


@pytest.mark.parametrize("saved", [(), ("hidden",)])
def test_an_iteration_keeps_what_is_named_and_no_weights(saved):
    layout = loop_layout(layout_of(stage=2, data=2))
    Stage, Data, Layer, Rows = layout.axis(STAGE), layout.axis(DATA), Axis(LAYER, 3), Axis(BATCH, 5)
    weights = {"matrix": hax.zeros((Stage, Layer, Embed, Out)), "bias": hax.zeros((Stage, Layer, Embed))}
    of_rows = hax.zeros((Axis("microbatch", 2), Data, Rows, Position))
    fixed = Fixed({"positions": of_rows, "segment_ids": of_rows}, dict.fromkeys(weights))
    stages = Stages(toy_layer, Schedule(2, 2), layout, saved, trained=lambda weights: weights)
    *_, kept = jax.eval_shape(stages.forward, weights, hax.zeros((Stage, Data, Rows, Position, Embed)), fixed, 0)
    shape = tuple(axis.size for axis in (Stage, Data, Layer, Rows, Position, Embed))
    assert [leaf.shape for leaf in kept] == [shape for _ in saved]
