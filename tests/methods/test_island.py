"""Islands that a network joins, against `Diloco` in one mesh on the same batches."""

from functools import cache

import jax
import numpy as np
import pytest

from gregale.axes.layout import MeshConfig, make_mesh, standard_layout
from gregale.codecs.codec import FeedbackConfig, ReduceConfig
from gregale.methods.diloco import Diloco
from gregale.methods.schedule import Schedule
from tests.mesh.support import layout_of
from tests.methods.islands import LAYERS, ROWS, Everywhere, Fleet, InOneMesh, island_on, on_one_device, rows

FIRST_LEG = ReduceConfig(codec="int4")
BOTH_LEGS = ReduceConfig(codec="int4", gather_codec="int4", feedback=FeedbackConfig(beta=0.5))
TOPK = ReduceConfig(codec="topk", block=16, keep=4)
ONE_PHASE = ReduceConfig(codec="topk", block=16, keep=4, phases=1)
EXACTLY = ReduceConfig()


def far(found, expected) -> float:
    """The part of all values that are more than 1e-6 apart."""
    pairs = [(np.ravel(one), np.ravel(other)) for one, other in zip(found, expected, strict=True)]
    one, other = (np.concatenate(side) for side in zip(*pairs, strict=True))
    return float(np.mean(~(np.abs(one - other) <= 1e-6 * (1 + np.abs(other)))))  # NaN is apart from all


# Two programs round differently, and in four bits a value at the border of two codes then gets another one.
AT_A_BORDER = 1e-3


CASES = {
    "diloco": (Schedule(3), 0.0, EXACTLY, Diloco, True),
    "tau 2": (Schedule(4, 3, 2, LAYERS), 0.5, EXACTLY, Diloco, True),
    "int4": (Schedule(2, 2, 1, LAYERS), 0.5, FIRST_LEG, Diloco, False),
    "topk": (Schedule(2, 2, 1, LAYERS), 0.5, TOPK, Everywhere, False),
    "topk in one phase": (Schedule(2, 2, 1, LAYERS), 0.5, ONE_PHASE, Diloco, False),
    "int4 and int4": (Schedule(2, 2, 1, LAYERS), 0.5, BOTH_LEGS, Everywhere, False),
}


@cache
def trajectory(case: str) -> tuple[list, list]:
    """In one mesh: the replicas' parameters after each step, and theta at the end, after a last synchronisation."""
    schedule, mixing, config, kind, uneven = CASES[case]
    mesh, after = InOneMesh(layout_of(replica=2), schedule, mixing, config, kind, uneven), []
    for t in steps(schedule):
        mesh.step(t)
        after.append([mesh.parameters(k) for k in range(2)])
    whole = jax.jit(mesh.method.outer_parameters)(mesh.state.method)
    return after, [np.asarray(array) for array in jax.tree.leaves(whole)]


def steps(schedule: Schedule) -> range:
    """More than two periods."""
    return range(1, 2 * schedule.period + schedule.delay + 2)


def compared(case: str, islands=None, reduce=None) -> list[float]:
    """How far islands are from one mesh: their parameters after each step, then theta."""
    schedule, mixing, config, _, uneven = CASES[case]
    fleet = Fleet.of(islands or [on_one_device(schedule, mixing, reduce or config)] * 2, uneven)
    expected, theta = trajectory(case)
    apart = []
    for t, replicas in zip(steps(schedule), expected, strict=True):
        fleet.step(t)
        apart += [far(member.parameters, own) for member, own in zip(fleet.members, replicas, strict=True)]
    assert fleet.rounds >= 2
    fleet.close(steps(schedule)[-1])
    return apart + [far(member.theta, theta) for member in fleet.members]


@pytest.mark.parametrize("case", CASES)
def test_islands_do_what_diloco_does_in_one_mesh(case):
    assert max(compared(case)) <= (AT_A_BORDER if CASES[case][2].quantised else 0)


def test_another_decay_would_be_seen():
    wrong = ReduceConfig(codec="int4", gather_codec="int4", feedback=FeedbackConfig(beta=0.6))
    assert max(compared("int4 and int4", reduce=wrong)) > 10 * AT_A_BORDER


def test_islands_on_meshes_of_their_own_do_the_same():
    """Two islands of four devices, side by side; one shares sequences, which splits its parameters too."""
    meshes = MeshConfig(replica=2, stage=2), MeshConfig(context=2, data=2)
    parts = [jax.devices()[4 * k : 4 * k + 4] for k in range(2)]
    layouts = [standard_layout(make_mesh(mesh, devices)) for mesh, devices in zip(meshes, parts, strict=True)]
    schedule, mixing, _, _, _ = CASES["tau 2"]
    assert max(compared("tau 2", [island_on(layout, schedule, mixing) for layout in layouts])) <= AT_A_BORDER


def test_all_members_of_a_fleet_come_to_the_same_bits():
    schedule, mixing, reduce, _, _ = CASES["int4 and int4"]
    fleet = Fleet.of([on_one_device(schedule, mixing, reduce)] * 3, uneven=True)
    start = fleet.members[0].theta
    for t in range(1, 4):
        fleet.step(t)  # compares their digests
    for member in fleet.members:
        for one, other in zip(member.theta, fleet.members[0].theta, strict=True):
            assert one.tobytes() == other.tobytes()
    assert far(fleet.members[0].theta, start) > 0.9


@pytest.mark.quick
def test_one_that_comes_too_late_weighs_nothing_and_keeps_its_steps():
    island = on_one_device(*CASES["diloco"][:2])
    three, two = (Fleet.of([island] * count) for count in (3, 2))
    for t in (1, 2):
        for fleet in (three, two):
            for k, member in enumerate(fleet.members):
                values = rows(t, 3)
                member.train({name: value[k * ROWS : (k + 1) * ROWS] for name, value in values.items()}, t)
    late = three.members[2]
    theta, own, moment = late.theta, late.parameters, late.host.now()
    three.send(0, [member.seen[0] for member in three.members[:2]] + [0.0])
    two.send(0, [member.seen[0] for member in two.members])
    assert far(late.theta, two.members[0].theta) == 0
    assert late.seen[0] == 2 * ROWS, "they count in its next round"
    moved = late.host.theta(0, moment), late.host.theta(0)
    late.state = late.state._replace(method=island.rebase(late.state.method, *moved, island.fragment(0)))
    for now, then, new, old in zip(late.parameters, own, late.theta, theta, strict=True):
        assert far([new], [old]) > 0
        np.testing.assert_allclose(now, then + (new - old), rtol=0, atol=1e-6)
    late.errors[0] = None
    late.arrive(0, keep=0.0)
    assert far(late.parameters, late.theta) == 0, "as after healing"


def test_the_outer_parameters_replace_parameters_that_are_not_finite():
    (member,) = Fleet.of([on_one_device(*CASES["diloco"][:2])]).members
    inner = member.state.method.psdp
    broken = jax.tree.map(lambda array: array * np.nan, inner.parameters)
    member.state = member.state._replace(method=member.state.method._replace(psdp=inner._replace(parameters=broken)))
    member.errors[0] = None
    member.arrive(0, keep=0.0)
    for own, outer in zip(member.parameters, member.theta, strict=True):
        np.testing.assert_array_equal(own, outer)


def test_the_norm_is_that_of_the_whole_fragment_and_tells_what_is_not_finite():
    island = on_one_device(Schedule(4, 3, 0, LAYERS))
    (member,) = Fleet.of([island]).members
    member.train(rows(1, 1), 1)
    for index in range(3):
        fragment = island.fragment(index)
        theta, own = member.host.theta(index), fragment.take(member.state.method.psdp.parameters)
        pairs = zip(jax.tree.leaves(theta), jax.tree.leaves(own), strict=True)
        moved = np.concatenate([np.ravel(np.asarray(one) - np.asarray(other)) for one, other in pairs])
        found = float(island.norm(member.state.method, theta, fragment))
        assert found == pytest.approx(float(np.sqrt(np.mean(np.square(moved)))), rel=1e-5)
        broken = jax.tree.map(lambda array: array * np.nan, theta)
        assert not np.isfinite(float(island.norm(member.state.method, broken, fragment)))
