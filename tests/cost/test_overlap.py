import re
from dataclasses import replace

import numpy as np
import pytest

from gregale.cost import audit
from gregale.cost.chips import Ici, chip
from gregale.cost.collectives import BETWEEN, INSIDE, Grid
from gregale.cost.hlo import parse
from gregale.cost.overlap import HOST, Rates, ends, schedule_of
from gregale.cost.pallas_cost import Kernels
from tests.cost.conftest import stored_program

RATES = Rates(cycles_per_second=1000, bytes_per_second={INSIDE: 1000}, kernels=Kernels(chip("v5e")))
# What one device of four sends of 256 bytes in an all-reduce: 384 bytes, so 0.384 s. A product takes 0.1 s.
PRODUCT = 'dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, backend_config={"estimated_cycles":"100"}'
GROUPS = "replica_groups={{0,1,2,3}}, to_apply=%sum"
PROGRAM = stored_program("scheduled")
START, DONE = "f32[8,8] all-reduce-start(%x), channel_id=1, " + GROUPS, "f32[8,8] all-reduce-done"


def weighed(pod, *schedule: str) -> tuple[float, float]:
    """Seconds of the collectives inside the slice, and those exposed."""
    text = PROGRAM.replace("SCHEDULE", "\n  ".join(schedule))
    found = audit(text, pod((1, 4, 1)), {"loop": 5})
    schedule = schedule_of(text, found.collectives, RATES, {"loop": 5})
    assert schedule is not None
    assert schedule.seconds == pytest.approx(0.1 * text_products(text) + schedule.exposed)
    return schedule.links[INSIDE].seconds, schedule.links[INSIDE].exposed


def text_products(text: str) -> int:
    """Products in a run: the loop's five times, if it is called."""
    entry = text[text.index("ENTRY") :]
    return entry.count("dot(") + (5 if "while(" in entry else 0)


def about(seconds: float, exposed: float):
    return pytest.approx((seconds, exposed))


def test_a_collective_is_hidden_as_long_as_compute_lasts(pod):
    products = [f"%p{number} = f32[8,8] {PRODUCT}" for number in range(5)]
    start, done = f"%a = {START}", f"%b = {DONE}(%a)"
    assert weighed(pod, start, done) == about(0.384, 0.384)
    assert weighed(pod, start, products[0], done) == about(0.384, 0.284)
    assert weighed(pod, start, *products, done) == about(0.384, 0)
    assert weighed(pod, f"%a = f32[8,8] all-reduce(%x), channel_id=1, {GROUPS}", *products) == about(0.384, 0.384)


def test_collectives_share_their_link(pod):
    """Two with 0.3 s of compute: the second begins when the first is done, 0.084 s later."""
    products = [f"%p{number} = f32[8,8] {PRODUCT}" for number in range(3)]
    both = [f"%a = {START}", f"%b = {START}", *products, f"%c = {DONE}(%a)", f"%d = {DONE}(%b)"]
    assert weighed(pod, *both) == about(0.768, 0.468)


def test_a_loop_is_weighed_once_and_counted_as_often_as_it_runs(pod):
    loop = "%loop = (s32[], f32[8,8]) while(%x), condition=%condition, body=%body"
    assert weighed(pod, loop) == about(5 * 0.384, 5 * 0.284)
    around = [f"%a = {START}", loop, f"%b = {DONE}(%a)"]
    assert weighed(pod, *around) == about(6 * 0.384, 5 * 0.284), "the loop hides what is around it"


def test_copies_to_the_host_and_from_it_are_waited_for(pod):
    """256 bytes at 500 a second each way: 0.512 s, the first two in sequence."""
    rates = replace(RATES, bytes_per_second={INSIDE: 1000, HOST: 500})
    there, stack = "f32[8,8]{1,0:S(5)}", "f32[3,8,8]{2,1,0:S(5)}"
    schedule = [
        f"%a = ({there}, f32[8,8], u32[]) copy-start(%x)",
        f"%b = (({stack}, f32[1,8,8], s32[]), {stack}, u32[]) dynamic-update-slice-start(%y, %z, %i)",
        f"%c = (({stack}, s32[]), f32[1,8,8], u32[]) dynamic-slice-start(%y, %i)",
        "%d = (f32[8,8], f32[8,8]{1,0:S(1)}, u32[]) copy-start(%x)",
        *(f"%p{number} = f32[8,8] {PRODUCT}" for number in range(4)),
        "%e = f32[1,8,8] dynamic-slice-done(%c)",
        f"%f = {stack} dynamic-update-slice-done(%b)",
        f"%g = {there} copy-done(%a)",
    ]
    text = PROGRAM.replace("SCHEDULE", "\n  ".join(schedule))
    found = schedule_of(text, audit(text, pod((1, 4, 1))).collectives, rates, {})
    assert found.links["host, from"].exposed == pytest.approx(0.512 - 0.4)
    assert (found.links["host, to"].seconds, found.seconds) == pytest.approx((2 * 0.512, 2 * 0.512))


def test_without_estimates_of_cycles_nothing_is_said(pod):
    text = re.sub(", backend_config=.*", "", PROGRAM.replace("SCHEDULE", f"%a = {START}"))
    assert schedule_of(text, audit(text, pod((1, 4, 1))).collectives, RATES, {}) is None


def test_transfers_between_slices_end_where_they_are_received(stored, pod):
    text = stored("tpu_layers")
    found = audit(text, pod((2, 2, 2), slices=2))
    waiting = ends(parse(text))
    for collective in found.collectives:
        assert (collective.name in waiting) == collective.is_async, collective
        if collective.link == BETWEEN:
            assert (waiting[collective.name] or "").startswith("recv-done")
    assert all(waiting.values())


def test_a_known_grid_times_what_is_inside_a_slice(pod):
    """A line of four chips: the corner has one link of 500 bytes a second."""
    text = PROGRAM.replace("SCHEDULE", f"%a = f32[8,8] all-reduce(%x), channel_id=1, {GROUPS}")
    grid = Grid(Ici(500, ring=16, cubes=False), (4,), np.arange(4)[:, None])
    found = schedule_of(text, audit(text, pod((1, 4, 1))).collectives, replace(RATES, grid=grid), {})
    assert found.exposed == pytest.approx(384 / 500)
