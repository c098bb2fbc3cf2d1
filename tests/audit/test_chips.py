"""The table of chips: complete, in the stated units, and of the right order."""

import dataclasses

import pytest

from gregale.audit.chips import CHIPS, GBIT, GIB, Chip, chip
from gregale.errors import UserError

ASKED_FOR = ["v4", "v5e", "v5p", "v6e", "v7x", "A100", "A100-40GB", "H100", "H200", "B200"]
every_chip = pytest.mark.parametrize("found", CHIPS.values(), ids=CHIPS)


def test_every_chip_that_plan_names_is_there():
    assert sorted(CHIPS) == sorted(ASKED_FOR)


@every_chip
def test_every_figure_has_a_value_and_a_source(found):
    for field in dataclasses.fields(Chip):
        if field.name not in ("network_bytes_per_second", "cycles_per_second"):
            assert getattr(found, field.name), field.name
    assert (found.cycles_per_second is not None) == (found.link == "ICI")
    assert len(found.source) > 10
    assert "://" not in found.source


@every_chip
def test_orders_of_magnitude(found):
    assert 16 * GIB <= found.memory_bytes <= 192 * GIB
    assert 1e14 < found.flops_per_second < 5e15
    assert 0.5e12 < found.memory_bytes_per_second < 1e13
    # Slow to fast: data-centre network, interconnect, memory.
    assert found.link_bytes_per_second < found.memory_bytes_per_second
    assert 1e10 < found.host_bytes_per_second < found.link_bytes_per_second
    if found.network_bytes_per_second is not None:
        assert 3e9 <= found.network_bytes_per_second < found.link_bytes_per_second / 5
    assert 100 < found.flops_per_second / found.memory_bytes_per_second < 700, "the ridge of the roofline"


def test_figures_that_are_quoted_elsewhere():
    # Pod figures of the same pages: a v5e pod of 256 has 50.63 PFLOP/s, a v6e pod 234.9 PFLOP/s and 25.6 Tbit/s.
    assert 256 * chip("v5e").flops_per_second == pytest.approx(50.63e15, rel=0.005)
    assert 256 * chip("v6e").flops_per_second == pytest.approx(234.9e15, rel=0.005)
    assert 256 * chip("v6e").network_bytes_per_second == pytest.approx(25.6e12 / 8)
    # One direction: v5p's 4800 Gbit/s, v5e's 1600 Gbit/s.
    assert chip("v5p").link_bytes_per_second == 4800 * GBIT
    assert chip("v5e").link_bytes_per_second == 1600 * GBIT
    # NVLink 4: 18 links of 25 GB/s each way; the H100 without sparsity.
    assert chip("H100").link_bytes_per_second == 18 * 25e9
    assert chip("H100").flops_per_second == pytest.approx(989.5e12)


def test_case_does_not_matter():
    assert chip("h100") is chip("H100")
    assert chip("V5E") is chip("v5e")


def test_an_unknown_chip_lists_the_choices():
    with pytest.raises(UserError, match=r"'v3' is not in the table; choose one of v4, v5e, .*B200"):
        chip("v3")
