"""The order of positions, by hand."""

import numpy as np

from gregale.axes.parameters import position_order


def test_a_device_holds_an_early_and_a_late_chunk_each_in_its_order():
    assert position_order(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert position_order(6, 3).tolist() == [0, 5, 1, 4, 2, 3]
    np.testing.assert_array_equal(position_order(5, 1), range(5))
