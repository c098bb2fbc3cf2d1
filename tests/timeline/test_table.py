"""The table of the Streaming DiLoCo paper (arXiv 2501.18512, Table 4) from the model."""

from pathlib import Path

import numpy as np
import pytest
from gregale.timeline.table import GRID_GBIT_PER_SECOND, needed_bandwidths, run_method

from gregale.timeline.methods import PAPER_METHODS, Cadence
from gregale.timeline.model import PRESETS, Ring

DOCUMENT = Path(__file__).parents[2] / "docs" / "simulate.md"

# Gbit/s for 50, 80, 90, 95 and 99 percent, a row for each of PAPER_METHODS.
PAPER = {
    "1b": [
        [86.8, 152.6, 184.2, 222.3, 569.0],
        [1.4, 6.2, 13.3, 23.3, 86.8],
        [1.4, 5.2, 9.1, 16.0, 28.1],
        [1.4, 4.3, 6.2, 9.1, 11.0],
        [0.4, 0.9, 1.7, 2.0, 3.0],
    ],
    "10b": [
        [104.8, 222.3, 222.3, 268.3, 471.5],
        [1.7, 7.5, 16.0, 33.9, 104.8],
        [1.7, 5.2, 9.1, 13.3, 19.3],
        [1.7, 3.6, 5.2, 6.2, 7.5],
        [0.4, 0.9, 1.4, 1.4, 1.7],
    ],
    "100b": [
        [184.2, 323.8, 390.7, 390.7, 471.5],
        [3.0, 11.0, 23.3, 49.4, 184.2],
        [2.4, 6.2, 9.1, 11.0, 19.3],
        [1.7, 3.6, 4.3, 5.2, 5.2],
        [0.5, 0.9, 1.1, 1.1, 1.4],
    ],
}


def cell(gbit_per_second):
    return int(np.abs(np.log(GRID_GBIT_PER_SECOND / gbit_per_second)).argmin())


def cells_off(model):
    """Cells of the grid between the model's value and the paper's, [method, goal]."""
    runs = [run_method(name, PRESETS[model], Ring(2), Cadence()) for name in PAPER_METHODS]
    needed = [needed_bandwidths(run.utilisation) for run in runs]
    return np.array(
        [[cell(v) - cell(p) for v, p in zip(*rows, strict=True)] for rows in zip(needed, PAPER[model], strict=True)]
    )


@pytest.mark.parametrize(("model", "at_least"), [("1b", 25), ("10b", 25), ("100b", 23)])
def test_values_are_within_one_cell_of_the_paper(model, at_least):
    off = cells_off(model)
    assert (np.abs(off) <= 1).sum() >= at_least
    assert np.abs(off).max() <= 2


def test_the_paper_mostly_prints_the_cell_below():
    # The last bandwidth that falls short, in place of the first that reaches the goal; see docs/simulate.md.
    off = np.concatenate([cells_off(model).ravel() for model in PAPER])
    assert (off == 1).sum() >= 67


def test_every_paper_value_is_on_the_grid():
    for value in np.ravel(list(PAPER.values())):
        assert GRID_GBIT_PER_SECOND[cell(value)] == pytest.approx(value, abs=0.06)


def test_the_first_bandwidth_that_reaches_a_goal_is_read():
    bandwidths = np.array([1.0, 2.0, 3.0, 4.0])
    utilisation = np.array([0.2, 0.5, 0.7, 0.98])
    assert needed_bandwidths(utilisation, bandwidths) == [2.0, 4.0, 4.0, 4.0, None]


def test_a_codec_in_place_of_the_methods_own():
    workload, ring, cadence = PRESETS["1b"], Ring(2), Cadence()
    own = run_method("streaming_overlap_4bit", workload, ring, cadence)
    other = run_method("streaming_overlap", workload, ring, cadence, codec="4bit")
    np.testing.assert_array_equal(own.utilisation, other.utilisation)


def test_the_documentation_shows_these_numbers():
    rows = [line.split("|")[3:8] for line in DOCUMENT.read_text().splitlines() if " / " in line and line[0] == "|"]
    shown = [[tuple(float(number) for number in pair.split("/")) for pair in row] for row in rows]
    expected = []
    for model, table in PAPER.items():
        for name, published in zip(PAPER_METHODS, table, strict=True):
            run = run_method(name, PRESETS[model], Ring(2), Cadence())
            needed = [round(value or 0.0, 1) for value in needed_bandwidths(run.utilisation)]
            expected.append(list(zip(needed, published, strict=True)))
    assert shown == expected
