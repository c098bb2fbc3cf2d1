"""The table of chips: complete, in the stated units, and of the right order."""

import pytest

from gregale.cost.chips import CHIPS, GBIT, GIB, chip
from gregale.errors import UserError


def test_every_chip_has_figures_of_the_right_order_and_a_source():
    assert sorted(CHIPS) == sorted(["v4", "v5e", "v5p", "v6e", "v7x", "A100", "A100-40GB", "H100", "H200", "B200"])
    for name, found in CHIPS.items():
        assert 16 * GIB <= found.memory_bytes <= 192 * GIB, name
        assert 1e14 < found.flops_per_second < 5e15, name
        assert 0.5e12 < found.memory_bytes_per_second < 1e13, name
        # Slow to fast: data-centre network, interconnect, memory.
        assert 1e10 < found.host_bytes_per_second < found.link_bytes_per_second < found.memory_bytes_per_second, name
        if found.network_bytes_per_second is not None:
            assert 3e9 <= found.network_bytes_per_second < found.link_bytes_per_second / 5, name
        assert 100 < found.flops_per_second / found.memory_bytes_per_second < 700, "the ridge of the roofline"
        assert (found.cycles_per_second is not None) == name.startswith("v")
        assert len(found.source) > 10
        assert "://" not in found.source


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


def test_chips_are_found_by_name():
    assert chip("h100") is chip("H100")
    with pytest.raises(UserError, match=r"'v3' is not in the table; choose one of v4, v5e, .*B200"):
        chip("v3")
