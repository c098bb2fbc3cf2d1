"""Sites, links and the ring."""

import numpy as np
import pytest

from gregale.errors import UserError
from gregale.timeline.fleet import NEVER, Fleet, Ring


def test_two_sites_take_the_papers_time():
    seconds = Ring(sites=2, slowest_link=1.0, latency_seconds=0.0).link_seconds(1e9 / 8, np.array([1e9, 4e9]))
    np.testing.assert_allclose(seconds, [1.0, 0.25])


def test_eight_sites_send_seven_quarters():
    ring = Ring(sites=8, slowest_link=0.5, latency_seconds=0.01)
    assert ring.sent_bytes(4.0) == 7.0
    np.testing.assert_allclose(ring.link_seconds(4.0, np.array([56.0])), [2.0])
    assert ring.delay_seconds == pytest.approx(0.14)


def test_a_ring_passes_over_the_sites_that_left():
    links = np.full((4, 4), 8.0)
    links[1, 2] = 2.0  # on the ring of four
    links[1, 3] = 3.0  # on the ring without site 2
    links[3, 1] = 0.1  # on neither: the ring goes one way round
    fleet = Fleet(np.ones(4), np.array([NEVER, NEVER, 5, NEVER]), links=links)
    assert fleet.ring_at_step(4) == Ring(4, 2.0, 0.0)
    assert fleet.ring_at_step(5) == Ring(3, 3.0, 0.0)


def test_a_matrix_of_another_size_is_refused():
    with pytest.raises(UserError, match="links: the matrix is 3 x 3, but there are 2 sites; it must be 2 x 2"):
        Fleet(np.ones(2), np.full(2, NEVER), links=np.ones((3, 3)))


@pytest.mark.parametrize("speed", [0.0, -1.0, np.nan])
def test_a_link_that_carries_nothing_is_named(speed):
    links = np.ones((3, 3))
    links[2, 0] = speed
    with pytest.raises(UserError, match="the link from site 2 to site 0 has the speed"):
        Fleet(np.ones(3), np.full(3, NEVER), links=links)
