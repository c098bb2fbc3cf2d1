"""Settings of malloc that keep freed memory in the process, for training on CPU devices."""

import ctypes
import os
from collections.abc import Mapping

# Parameter -> value, with the numbers of glibc's malloc.h. Few arenas, which grow by at least 64 MiB and never shrink;
# no allocation is mapped separately, since free() would unmap it. Only the main arena keeps all its memory. One arena
# alone is slow: compiling fragments it, and threads then wait for its lock (twice the time on eight devices).
OPTIONS = {-8: 4, -4: 0, -1: 2**31 - 1, -2: 64 << 20}  # M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD


def keep_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Make glibc's malloc keep freed memory unless the user has configured it; return whether this succeeded.

    By default glibc maps and unmaps the temporaries of each step. The page faults take a tenth to a fifth of a step's
    processor time. Call this before JAX starts its threads, which would create other arenas. The cost: memory that was
    used once, also for loading and compiling, is not returned before the process ends.
    """
    if any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in environment):
        return False
    if not _is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    results = [mallopt(parameter, value) for parameter, value in OPTIONS.items()]  # 1; 0: unknown parameter
    return all(results)


def release_memory() -> None:
    """Return unused memory to the system (glibc only), for code that loads large arrays in sequence without steps."""
    if _is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _is_glibc() -> bool:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") is not None
    except (AttributeError, OSError, ValueError):  # Windows, musl, macOS
        return False
