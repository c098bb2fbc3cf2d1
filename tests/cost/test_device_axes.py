"""From groups of devices to mesh axes, on meshes of any shape."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gregale.cost.collectives import BETWEEN, INSIDE, UNKNOWN, DeviceCoordinates
from tests.cost.test_groups import counted_groups

meshes_and_axes = st.lists(st.integers(2, 4), min_size=1, max_size=4).flatmap(
    lambda sizes: st.tuples(st.just(tuple(sizes)), st.sets(st.integers(0, len(sizes) - 1), min_size=1))
)


@settings(deadline=None)
@given(case=meshes_and_axes, seed=st.integers(0, 99))
def test_whole_axes_are_recognized_whatever_the_order_of_members(case, seed, pod):
    sizes, axes = case
    names = tuple("abcd"[: len(sizes)])
    random = np.random.default_rng(seed)
    groups = [tuple(random.permutation(group).tolist()) for group in counted_groups(sizes, axes)]
    placement = DeviceCoordinates(pod(sizes, names=names), int(np.prod(sizes)))
    crossing = placement.crossing(placement.by_number(tuple(groups)))
    assert crossing.axes == crossing.touched == tuple(names[axis] for axis in sorted(axes))
    assert crossing.group_size == np.prod([sizes[axis] for axis in axes])


@pytest.mark.parametrize(
    ("groups", "touched"),
    [
        (((0, 7), (1, 6), (2, 5), (3, 4)), ("replica", "data", "model")),  # diagonals
        (((0, 1), (2, 3), (4, 6), (5, 7)), ("data", "model")),  # one axis here, another there
        (((0, 1, 2), (3, 4, 5)), ("replica", "data", "model")),  # three of four
        (((0, 1), (2, 3, 4, 5)), ("replica", "data", "model")),  # unequal
        (((0, 0),), ()),
    ],
)
def test_groups_that_are_no_grid_are_unknown_but_touch_what_they_touch(groups, touched, pod):
    crossing = DeviceCoordinates(pod((2, 2, 2)), 8).crossing(groups)
    assert crossing.axes == (UNKNOWN if touched else ())
    assert crossing.touched == touched


def test_a_slice_of_gpus_is_a_process(boxes):
    placement = DeviceCoordinates(boxes((2, 4), ("replica", "data")), 8)
    assert placement.crossing(((0, 4), (1, 5), (2, 6), (3, 7))).link == BETWEEN
    assert placement.crossing(((0, 1, 2, 3), (4, 5, 6, 7))).link == INSIDE


def test_axes_of_size_one_are_never_crossed_and_parts_of_an_axis_are(pod):
    assert DeviceCoordinates(pod((1, 4, 2)), 8).crossing(((0, 1, 2, 3, 4, 5, 6, 7),)).axes == ("data", "model")
    assert DeviceCoordinates(pod((1, 4, 2)), 8).crossing(tuple((place,) for place in range(8))).axes == ()
    crossing = DeviceCoordinates(pod((2, 4), names=("a", "b")), 8).crossing(((0, 1), (2, 3), (4, 5), (6, 7)))
    assert (crossing.axes, crossing.group_size) == (("b",), 2)


def test_groups_of_devices_outside_the_mesh_may_cross_anything(pod):
    placement = DeviceCoordinates(pod((2, 2, 1)), 4)
    assert placement.by_number(((0, 9),)) is None
    assert placement.by_id(((0, 9),)) is None
    crossing = placement.crossing(None)
    assert (crossing.axes, crossing.touched) == (UNKNOWN, ("replica", "data"))


def test_the_moves_of_a_permutation_cross_where_they_move(pod):
    placement = DeviceCoordinates(pod((2, 2, 2)), 8)
    assert placement.crossing(((0, 4), (1, 5)), pairs=True).axes == ("replica",)
    assert placement.crossing(((0, 6),), pairs=True).axes == ("replica", "data")
    assert placement.crossing((), pairs=True).axes == ()


def test_one_program_for_each_slice_is_numbered_within_its_slice(pod):
    mesh = pod((2, 2, 2), slices=2)
    placement = DeviceCoordinates(mesh, 4)
    groups = placement.by_number(((0, 1), (2, 3)))
    assert groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert placement.crossing(groups).axes == ("model",)
    assert placement.crossing(groups).link == INSIDE
    far = placement.by_id(((100000, 200000), (100003, 200003)))
    assert far == ((0, 4), (3, 7))
    assert placement.crossing(far).link == BETWEEN
