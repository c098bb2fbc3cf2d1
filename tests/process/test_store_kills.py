"""The short form of `benchmarks/store_kills.py`: kills within saves into a store."""

from __future__ import annotations

import importlib
import random
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
KILLS = 2


@pytest.fixture(scope="module")
def store_kills():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("store_kills")


def test_what_counts_after_a_kill_is_sound(store_kills, s3):
    source = random.Random(1)
    for _ in range(KILLS):
        row = store_kills.killed(s3 / "checkpoints", source)
        assert row.wrong == ""
        assert len(row.steps) >= 2
