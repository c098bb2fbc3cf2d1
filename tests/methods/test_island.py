"""Islands that a network joins, against `Diloco` in one mesh on the same batches."""

import jax
import numpy as np
import pytest

from gregale.axes.layout import standard_layout
from gregale.axes.mesh import MeshConfig, make_mesh
from gregale.codecs.config import FeedbackConfig, ReduceConfig
from gregale.methods.diloco import Diloco
from gregale.methods.schedule import Schedule
from tests.mesh.support import layout_of
from tests.methods.islands import LAYERS, Everywhere, Fleet, InOneMesh, island_on

FIRST_LEG = ReduceConfig(codec="int4")
BOTH_LEGS = ReduceConfig(codec="int4", second_leg="int4", feedback=FeedbackConfig(beta=0.5))
EXACTLY = ReduceConfig()


def own_meshes(count: int, data: int = 1, model: int = 1):
    """Layouts of as many islands, each on devices of its own."""
    size = data * model
    parts = [jax.devices()[k * size : (k + 1) * size] for k in range(count)]
    return [standard_layout(make_mesh(MeshConfig(data=data, model=model), devices)) for devices in parts]


def far(found, expected) -> float:
    """The part of all values that are more than 1e-6 apart."""
    pairs = [(np.ravel(one), np.ravel(other)) for one, other in zip(found, expected, strict=True)]
    one, other = (np.concatenate(side) for side in zip(*pairs, strict=True))
    return float(np.mean(np.abs(one - other) > 1e-6 * (1 + np.abs(other))))


# Two programs round differently, and in four bits a value at the border of two codes then gets another one.
AT_A_BORDER = 1e-3


CASES = {
    "diloco": (Schedule(3), 0.0, EXACTLY, Diloco, False),
    "uneven": (Schedule(3), 0.0, EXACTLY, Diloco, True),
    "tau 0": (Schedule(4, 3, 0, LAYERS), 0.5, EXACTLY, Diloco, False),
    "tau 1": (Schedule(4, 4, 1, LAYERS), 0.5, EXACTLY, Diloco, True),
    "tau 2": (Schedule(4, 3, 2, LAYERS), 0.5, EXACTLY, Diloco, False),
    "int4": (Schedule(4, 3, 1, LAYERS), 0.5, FIRST_LEG, Everywhere, False),
    "int4 and int4": (Schedule(2, 2, 1, LAYERS), 0.5, BOTH_LEGS, Everywhere, False),
}


def compared(case: str, islands=None, reduce=None) -> list[float]:
    """How far islands are from one mesh over more than two periods: their parameters after each step, then theta."""
    schedule, mixing, config, kind, uneven = CASES[case]
    islands = islands or [island_on(layout_of(), schedule, mixing, reduce or config)] * 2
    fleet = Fleet.of(islands, uneven)
    mesh = InOneMesh(layout_of(replica=len(islands)), schedule, mixing, config, kind, uneven)
    apart = []
    for t in range(1, 2 * schedule.period + schedule.delay + 2):
        fleet.step(t)
        mesh.step(t)
        apart += [far(member.parameters, mesh.parameters(k)) for k, member in enumerate(fleet.members)]
    assert fleet.rounds >= 2
    return apart + [far(member.theta, mesh.theta) for member in fleet.members]


@pytest.mark.parametrize("case", CASES)
def test_islands_do_what_diloco_does_in_one_mesh(case):
    assert max(compared(case)) <= (AT_A_BORDER if CASES[case][2].quantised else 0)


@pytest.mark.parametrize(
    ("case", "wrong"),
    [
        ("int4", EXACTLY),
        ("int4", ReduceConfig(codec="int4", feedback=None)),
        ("int4 and int4", ReduceConfig(codec="int4", second_leg="int4", feedback=FeedbackConfig(beta=0.6))),
    ],
    ids=["exact", "no feedback", "another decay"],
)
def test_another_arithmetic_would_be_seen(case, wrong):
    assert max(compared(case, reduce=wrong)) > 10 * AT_A_BORDER
