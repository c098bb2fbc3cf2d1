"""Curves in a line."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gregale.programs.watch.view import BARS, GAP, sparkline

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        (range(8), 8, BARS),
        (range(7, -1, -1), 8, BARS[::-1]),
        (range(80), 8, BARS),
        ([1, 1, 9, 9], 2, "▁█"),
        ([0, 1], 60, "▁█"),
        ([5.0], 60, "▁"),
        ([5, 5, 5], 3, "▁▁▁"),
        ([0, NAN, 1], 3, "▁ █"),
        ([0, NAN, 1, INFINITY], 2, "▁█"),
        ([NAN, NAN], 2, "  "),
        ([], 10, ""),
        ([1, 2], 0, ""),
    ],
)
def test_a_line(values, width, line):
    assert sparkline(np.array(values, float), width) == line


def test_a_loss_has_a_shape_after_its_first_steps():
    losses = np.array([100.0, *np.linspace(4, 2, 39)])
    assert len(set(sparkline(losses, 40))) == len(BARS)


@given(st.lists(st.floats(width=32)), st.integers(1, 40))
def test_whatever_the_values_each_has_a_bar_or_a_gap(values, width):
    line = sparkline(np.array(values, float), width)
    assert len(line) == min(len(values), width)
    assert set(line) <= {*BARS, GAP}
