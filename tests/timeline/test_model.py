"""Workloads, presets and the ring between sites."""

import numpy as np
import pytest

from gregale.errors import UserError
from gregale.timeline.model import Ring, Workload


def test_nodes_of_a_step():
    workload = Workload(parameters=6.0, layers=2, step_seconds=1.2, microbatches=4)
    assert workload.nodes_per_pass == 5
    assert workload.node_seconds == pytest.approx(0.05)
    assert workload.parameters_per_layer == 3.0


def test_two_sites_take_the_papers_time():
    np.testing.assert_allclose(Ring(2).link_seconds(1e9 / 8, np.array([1e9, 4e9])), [1.0, 0.25])


def test_eight_sites_send_seven_quarters():
    ring = Ring(8, latency_seconds=0.01)
    assert ring.sent_bytes(4.0) == 7.0
    np.testing.assert_allclose(ring.link_seconds(4.0, np.array([28.0])), [2.0])
    assert ring.delay_seconds == pytest.approx(0.14)


@pytest.mark.parametrize("field", ["parameters", "layers", "step_seconds", "microbatches"])
def test_a_number_that_is_not_positive_is_named(field):
    values = {"parameters": 1.0, "layers": 1, "step_seconds": 1.0, "microbatches": 1}
    with pytest.raises(UserError, match=f"{field}: 0 is not possible"):
        Workload(**{**values, field: 0})
