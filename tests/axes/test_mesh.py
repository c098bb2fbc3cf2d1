"""Sizes of mesh axes, and the order of devices in a mesh."""

from math import prod

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gregale.axes.layout import AXES, MeshConfig, arrange, make_mesh
from gregale.errors import UserError
from tests.mesh.support import Device


def slices(count: int, hosts_each: int, each: int) -> list[Device]:
    """Devices in a random order, numbered by slice, then host."""
    places = list(np.ndindex(count, hosts_each, each))
    found = [Device(i, s * hosts_each + host, s) for i, (s, host, _) in enumerate(places)]
    return [found[i] for i in np.random.default_rng(0).permutation(len(found))]


def values_along(array: np.ndarray, axis: int, key: str) -> set[int]:
    """How many different values of the attribute `key` the lines along an axis have."""
    lines = np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis])
    return {len({getattr(device, key) for device in line}) for line in lines}


@pytest.mark.parametrize(("shape", "slices_a_line"), [((2, 1, 4, 2), 2), ((4, 1, 4, 1), 2), ((8, 2, 1, 1), 2)])
def test_only_replica_crosses_slices(shape, slices_a_line):
    array = arrange(slices(2, 2, 4), shape)
    assert array.shape == shape
    assert [values_along(array, axis, "slice_index") for axis in range(4)] == [{slices_a_line}, {1}, {1}, {1}]
    for number, half in enumerate(np.split(array, 2)):
        assert {device.slice_index for device in half.flat} == {number}


@pytest.mark.parametrize(
    ("shape", "hosts_a_line"),
    [
        ((4, 1, 2, 2), [{4}, {1}, {1}, {1}]),
        ((2, 1, 4, 2), [{2}, {1}, {2}, {1}]),  # data is 4 x 2 devices: two hosts
    ],
)
def test_replica_crosses_hosts_first_and_the_fast_axes_stay_inside_one_as_far_as_they_fit(shape, hosts_a_line):
    array = arrange(slices(1, 4, 4), shape)
    assert [values_along(array, axis, "process_index") for axis in range(4)] == hosts_a_line
    assert [device.id for device in array.flat] == list(range(16))


@pytest.mark.parametrize(
    ("devices", "shape", "message"),
    [
        (slices(4, 1, 4), (2, 1, 8, 1), "replica is 2, but the devices are 4 slices: .* multiple of 4"),
        ([each for each in slices(2, 1, 4) if each.id < 7], (1, 1, 7, 1), "slice 0: 4, slice 1: 3"),
    ],
    ids=["replicas that cannot hold whole slices", "slices of different sizes"],
)
def test_refused(devices, shape, message):
    with pytest.raises(UserError, match=message):
        arrange(devices, shape)


def test_the_real_mesh_has_the_axes_of_the_design():
    mesh = make_mesh(MeshConfig(replica=2, model=2))
    assert mesh.axis_names == AXES == ("island", "replica", "stage", "context", "data", "model")
    assert dict(mesh.shape) == {"island": 1, "replica": 2, "stage": 1, "context": 1, "data": 2, "model": 2}
    assert [device.id for device in mesh.devices.flat] == [device.id for device in jax.devices()]


sizes = st.sampled_from([1, 2, 3, 4, 6, 8])


@given(st.tuples(*[sizes] * len(AXES)), st.sampled_from([*AXES, None]), st.integers(1, 96))
def test_sizes_multiply_to_the_devices_or_the_message_has_the_arithmetic(given_sizes, free, devices):
    config = MeshConfig(**{axis: -1 if axis == free else size for axis, size in zip(AXES, given_sizes, strict=True)})
    given = prod(size for axis, size in zip(AXES, given_sizes, strict=True) if axis != free)
    works = devices % given == 0 if free else devices == given
    if works:
        found = config.sizes(devices)
        assert list(found) == list(AXES)
        assert prod(found.values()) == devices
        assert all(found[axis] == size for axis, size in zip(AXES, given_sizes, strict=True) if axis != free)
    else:
        with pytest.raises(UserError) as error:
            config.sizes(devices)
        message = str(error.value)
        assert f"= {given} devices" in message
        assert str(devices) in message
        if free is None:
            assert sum(config.sizes(given).values()) == sum(given_sizes), "the number of devices it offers works"
            assert f"devices: {given}`" in message


def test_own_mesh_axes_lie_last_or_in_the_given_order():
    assert make_mesh(MeshConfig(data=2, axes={"wide": 4})).axis_names == (*AXES, "wide")
    order = ["island", "replica", "wide", *AXES[2:]]
    mesh = make_mesh(MeshConfig(replica=2, data=2, axes={"wide": -1}, order=order))
    assert list(mesh.shape.items())[1:3] == [("replica", 2), ("wide", 2)]
    assert [device.id for device in mesh.devices[0, 0, 0].flat] == [0, 1]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"axes": {"data": 2}}, "axes.data is 2, but 'data' is a mesh axis already"),
        ({"axes": {"a b": 2}}, "axes.a b is 2, but 'a b' is no name of letters, digits and `_`"),
        ({"axes": {"wide": 2}, "order": list(AXES)}, "order is .*; it has to be all of island, .*, model, wide"),
        ({"order": [*AXES[::-1]]}, "in any order that begins with island and replica"),
        ({"axes": {"wide": -1}}, "is -1, and so is .*more than one -1"),
    ],
)
def test_own_mesh_axes_that_are_refused(given, words):
    with pytest.raises(UserError, match=words):
        MeshConfig(**given)
