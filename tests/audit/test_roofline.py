from dataclasses import replace

import pytest

from gregale.audit.chips import chip
from gregale.audit.roofline import Work, model_flops_per_token, roofline, work_of
from tests.audit.steps import small_step

WORK = Work(model_flops=3e12, flops=4e12, memory_bytes=1e9, link_bytes={"inside slice": 2e9, "between slices": 1e8})


def test_the_slowest_resource_bounds_the_step():
    v5p = chip("v5p")
    found = roofline(WORK, v5p, 1, None)
    assert found.compute == 4e12 / 459e12
    assert found.memory == 1e9 / 2765e9
    assert found.links == {"inside slice": 2e9 / 600e9, "between slices": 1e8 / 6.25e9}
    assert found.overlapped == max(found.compute, *found.links.values())
    assert found.one_after_another == found.compute + sum(found.links.values())
    assert found.mfu_bound == pytest.approx(3e12 / 459e12 / found.overlapped)


def test_a_given_link_replaces_the_chips_own_and_parts_of_a_chip_share_it():
    v7x = chip("v7x")
    assert roofline(WORK, v7x, 2, 1e6).links["between slices"] == 100
    assert roofline(WORK, v7x, 2, None).compute == 2 * roofline(WORK, v7x, 1, None).compute
    unpublished = replace(v7x, network_bytes_per_second=None)
    assert "between slices" not in roofline(WORK, unpublished, 2, None).links


def test_flops_by_hand():
    """Three layers: 6 FLOPs for each weight that is multiplied, and attention over 16 positions in full."""
    step = small_step((2, 2, 2), compute={"remat": "full"})
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
    weights = 3 * layer + 32 * 320 + 32
    assert model_flops_per_token(step) == 6 * weights + 12 * 3 * 32 * 16
    tied = small_step((2, 2, 2), model={"tied_head": True})
    assert model_flops_per_token(tied) == model_flops_per_token(step), "a tied table is multiplied, too"


def test_recomputing_adds_a_forward_pass_of_the_layers():
    full, none = (work_of(small_step((2, 2, 2), compute={"remat": remat}), 0, {}) for remat in ("full", "none"))
    assert none.flops == none.model_flops == full.model_flops
    assert 1.2 < full.flops / full.model_flops < 4 / 3
    assert full.memory_bytes > none.memory_bytes
