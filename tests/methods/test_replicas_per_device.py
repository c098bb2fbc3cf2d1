"""Several replicas on each index of the mesh axis `replica` make the steps that they make on devices of their own."""

from functools import cache

import jax
import numpy as np
import pytest

from gregale.axes.layout import REPLICA, Layout, MappingConfig, MeshConfig, make_mesh, mapped_layout
from gregale.codecs.codec import ReduceConfig
from gregale.methods.diloco import Diloco
from gregale.methods.method import Method
from gregale.methods.schedule import Schedule
from gregale.training.state import Stepper, initial_state
from tests.methods.islands import EXACTLY, LAYERS, OUTER, Net, batch_of, psdp_on, rows

REPLICAS = 8
FOUR_BITS = ReduceConfig(codec="int4", gather_codec="int4")
STREAMING = Schedule(4, 3, 1, LAYERS)
METHODS = {
    "psdp": (None, EXACTLY),
    "diloco": (Schedule(3), EXACTLY),
    "streaming, int4": (STREAMING, FOUR_BITS),
}


def layout_on(devices: int) -> Layout:
    mesh = make_mesh(MeshConfig(replica=devices, data=1), jax.devices()[:devices])
    return mapped_layout(mesh, MappingConfig(), REPLICAS // devices)


def method_on(layout: Layout, name: str) -> Method:
    schedule, reduce = METHODS[name]
    if schedule is None:
        return psdp_on(layout, reduce)
    return Diloco(psdp_on(layout.inside(REPLICA)), OUTER, layout, schedule, reduce=reduce)


@cache
def trained(name: str, devices: int):
    """The losses, norms and bytes of 6 steps, and the arrays after them; replica k leaves out k % 4 rows."""
    method = method_on(layout_on(devices), name)
    state, stepper, figures = initial_state(method, Net.init), Stepper(method, jax.eval_shape(Net.init)), []
    for step in range(1, 7):
        state, report = stepper(state, batch_of(rows(step, REPLICAS, uneven=True), method.layout), step)
        figures.append([np.asarray(each).mean() for each in (report.metrics.loss, report.metrics.grad_norm)])
    return figures, jax.tree.leaves(jax.device_get(state))


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", METHODS)
def test_eight_replicas_make_the_same_steps_on_fewer_devices(name, devices):
    """Losses, norms and the whole state; rounding may choose the other of two codes for a value between them."""
    figures, arrays = trained(name, devices)
    expected, of_devices = trained(name, REPLICAS)
    np.testing.assert_allclose(figures, expected, rtol=2e-5)
    sent = [method_on(layout_on(each), name).bytes_sent(8) for each in (devices, REPLICAS)]
    assert sent[0] == sent[1] > 0, "of each replica, as on a device of its own"
    differing = size = 0
    for array, other in zip(arrays, of_devices, strict=True):
        found, wanted = np.asarray(array, np.float32), np.asarray(other, np.float32)
        rtol = 2e-5 if array.dtype == np.float32 else 1e-2
        differing, size = differing + np.sum(~np.isclose(found, wanted, rtol, 2e-6)), size + found.size
    assert differing <= (1e-3 * size if METHODS[name][1].quantised else 0)
