"""Batches of leased examples: in the order of the leases, ahead of time, and none when nothing is leased."""

from __future__ import annotations

import numpy as np
from haliax import Axis

from gregale.programs.island.loop import LeasedBatches
from gregale.programs.runtime.batches import Placement
from tests.mesh.support import layout_of


class Counting:
    """Example i is the row [i, i]."""

    def batch(self, first: int, size: int, rows: list[int]) -> dict[str, np.ndarray]:
        del size
        return {"tokens": np.stack([np.full(2, first + row, np.int32) for row in rows])}


def test_they_follow_the_leases():
    firsts = [0, 4, 100]
    layout = layout_of(data=2)
    placement = Placement((Axis("batch", 4), Axis("position", 2)), layout)
    with LeasedBatches(Counting(), placement, lambda: firsts.pop(0) if firsts else None) as batches:
        seen = [np.asarray(next(batches)["tokens"].array)[:, 0].tolist() for _ in range(3)]
        assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [100, 101, 102, 103]]
        assert next(batches, None) is None
        firsts.append(8)  # a committed round has leased more
        assert np.asarray(next(batches)["tokens"].array)[0, 0] == 8
