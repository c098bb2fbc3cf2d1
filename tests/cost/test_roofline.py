from dataclasses import replace

import pytest

from gregale.cost.chips import chip
from gregale.cost.roofline import DeviceWork, roofline

LINKS = {"inside slice": 2e9, "between slices": 1e8}
WORK = DeviceWork(model_flops=3e12, full_flops=3.5e12, flops=4e12, memory_bytes=1e9, link_bytes=LINKS)


def test_the_slowest_resource_bounds_the_step():
    v5p = chip("v5p")
    found = roofline(WORK, v5p, 1, None)
    assert found.compute == 4e12 / 459e12
    assert found.memory == 1e9 / 2765e9
    assert found.links == {"inside slice": 2e9 / 600e9, "between slices": 1e8 / 6.25e9}
    assert found.overlapped == max(found.compute, *found.links.values())
    assert found.one_after_another == found.compute + sum(found.links.values())


def test_utilisation_has_two_definitions_and_is_never_above_one():
    bound = roofline(WORK, chip("v5p"), 1, None)
    found = bound.utilisation(seconds=0.01)
    assert found == pytest.approx({"utilisation": 3e12 / 459e10, "utilisation_full_attention": 3.5e12 / 459e10})
    assert bound.utilisation(3e12 / 459e12) == {"utilisation": 1.0, "utilisation_full_attention": None}


def test_a_given_link_replaces_the_chips_own_and_parts_of_a_chip_share_it():
    v7x = chip("v7x")
    assert roofline(WORK, v7x, 2, 1e6).links["between slices"] == 100
    assert roofline(WORK, v7x, 2, None).compute == 2 * roofline(WORK, v7x, 1, None).compute
    unpublished = replace(v7x, network_bytes_per_second=None)
    assert "between slices" not in roofline(WORK, unpublished, 2, None).links


def test_products_of_8_bit_numbers_take_half_the_time_and_the_host_has_a_link_of_its_own():
    v5e = chip("v5e")
    exact, eight = (roofline(replace(WORK, eight_bit_flops=each), v5e, 1, None) for each in (0, 1e12))
    assert exact.compute - eight.compute == pytest.approx(0.5e12 / 197e12)
    found = roofline(replace(WORK, host_bytes=6e9), v5e, 1, None)
    assert found.host == 6e9 / v5e.host_bytes_per_second == found.overlapped
    assert found.one_after_another == pytest.approx(exact.one_after_another + found.host)
