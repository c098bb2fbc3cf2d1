"""Arrays in shared memory without a name."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from gregale.errors import UserError
from gregale.islands.transport import shm


def mapped() -> int:
    """How many mappings of files that are gone this process has."""
    return sum("(deleted)" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("folder", [None, "here"])
def test_an_array_without_a_name(tmp_path, folder):
    before = set(os.listdir("/dev/shm")), mapped()
    array = shm.empty((300, 50), np.dtype(ml_dtypes.bfloat16), tmp_path if folder else None)
    assert (array.shape, array.dtype, array.flags.c_contiguous) == ((300, 50), ml_dtypes.bfloat16, True)
    assert not array.any()
    array[7, 8] = 3
    assert array[7, 8] == 3
    assert (set(os.listdir("/dev/shm")), os.listdir(tmp_path)) == (before[0], [])
    del array
    gc.collect()
    assert mapped() == before[1]


def test_empty_and_one_element_arrays():
    assert shm.empty((0, 3), np.dtype("float32")).shape == (0, 3)
    assert shm.empty((), np.dtype("float32")).shape == ()


def test_an_array_that_does_not_fit_is_refused_before_use(tmp_path):
    before = mapped()
    size = shm.free_bytes(Path("/dev/shm")) // 4 + 2**20
    with pytest.raises(
        UserError,
        match=r"MB for the outer state has no room in /dev/shm \(No space left.*MB are free\)\. Make it larger",
    ):
        shm.empty((size,), np.dtype("float32"))
    with pytest.raises(UserError, match=r"no room in .*missing \(No such file.*; 0.0 MB are free"):
        shm.empty((1,), np.dtype("float32"), tmp_path / "missing")
    assert mapped() == before
