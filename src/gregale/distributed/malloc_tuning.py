"""Memory that stays with the process from step to step, for training on CPU devices."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# The numbers of glibc's malloc.h: parameter -> value. Few arenas, grown by 64 MiB at least and never cut; nothing is
# mapped apart, since what is mapped apart is unmapped when it is freed. Only the main arena keeps everything: each of
# the others gives back what of it is free in one piece. But with one arena, its lock is what threads wait for once
# compiling has left it in pieces: eight simulated devices took twice as long in a process that had compiled.
OPTIONS = {-8: 4, -4: 0, -1: 2**31 - 1, -2: 64 << 20}  # M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD


def keep_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Lets malloc keep what it is given back, if it is glibc's and the user has not set it up; returns whether it does.

    glibc maps and unmaps a step's temporaries every time, and each page that is touched anew is a page fault: a tenth
    to a fifth of a step's processor time. To be called before JAX starts its threads, whose arenas would be others.
    The price: memory that was in use once, loading and compiling included, is not given back before the process ends.
    """
    if any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in environment):
        return False
    if not _is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    taken = [mallopt(parameter, value) for parameter, value in OPTIONS.items()]  # 1, or 0 for what it does not know
    return all(taken)


def give_back_memory() -> None:
    """Gives back what malloc has kept and nothing uses, where large arrays come one after the other and no step does.

    Only glibc's can; it looks through all of its arenas, in milliseconds.
    """
    if _is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _is_glibc() -> bool:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") is not None
    except (AttributeError, OSError, ValueError):  # Windows, musl, macOS
        return False
