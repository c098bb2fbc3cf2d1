"""Memory that is kept: in a process of its own, since it cannot be undone."""

import platform
import subprocess
import sys
from unittest.mock import Mock

import pytest

from gregale.distributed.devices import keep_memory

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt's parameters")

# Touches 64 MB and gives them back, over and over; prints the page faults of the last time.
PROGRAM = """
import ctypes, resource, sys
from gregale.distributed.devices import keep_memory

if sys.argv[1] == "kept":
    assert keep_memory()
libc, size = ctypes.CDLL(None), 64 << 20
libc.malloc.restype = ctypes.c_void_p
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = ctypes.c_void_p(libc.malloc(size))
    ctypes.memset(block, 1, size)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(way: str) -> int:
    command = [sys.executable, "-c", PROGRAM, way]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@glibc
def test_what_is_freed_is_used_again_without_a_page_fault():
    assert faults("kept") < 10
    assert faults("given back") > 10, "one for a page of 2 MB, if pages are large"


def test_a_users_own_setting_and_other_c_libraries_are_left_alone(monkeypatch):
    """musl knows no such name (OSError), macOS no such parameter (ValueError)."""
    for name in ("GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_"):
        assert not keep_memory({name: "1"})
    for answer in ({"side_effect": OSError}, {"side_effect": ValueError}, {"return_value": None}):
        monkeypatch.setattr("os.confstr", Mock(**answer))
        assert not keep_memory({})
