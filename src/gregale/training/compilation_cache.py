"""Compiled programs, kept in a folder so that the next start reads them instead of compiling them anew.

JAX's own cache does it, in a folder or in an object store, where process 0 writes. Nothing here may end a run: a folder
that cannot be used is not, a store that fails is not asked again, and an entry that cannot be read, of a killed process
or a full disk, is deleted and compiled again.

Whoever can write there can have the hosts run anything, as a program is machine code.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from gregale.atomic_files import user_cache
from gregale.data.sources.base import expand
from gregale.distributed.config import AUTO
from gregale.errors import UserError
from gregale.storage import RetryPolicy, StoragePath, is_url, names
from gregale.storage import storage_path as place_of
from gregale.streams import say

MOST_BYTES = 1 << 30  # of all programs together; those that were not used for longest go first
FOLDER = "jax_compilation_cache_dir"  # JAX's name of the setting
ENTRY = "-cache"  # how JAX ends the names of its files
STORE_PATIENCE = RetryPolicy(seconds=10, silence_seconds=10)  # a start does not wait long for what it can compile

_TROUBLE = re.compile(r"Error (?:reading|writing) persistent compilation cache entry for '([^']*)'")
_PROCESSOR = re.compile(r"^(?:flags|Features)\s*:(.*)$", re.MULTILINE)


def keep_compiled(place: str | None) -> None:
    """Keeps compiled programs from one start to the next; to be called before anything is compiled.

    - `place`: `compilation_cache` of a configuration: a folder; `auto`: `gregale` in the user's cache directory; the
      URL of a folder in a store: there, or in that directory if the store fails; None: nothing is kept

    A folder that JAX was given already, by JAX_COMPILATION_CACHE_DIR say, is left to JAX.
    """
    if place is None or getattr(jax.config, FOLDER) is not None:
        return
    with suppress(OSError, RuntimeError):  # RuntimeError: there is no home directory
        base = user_cache() if place == AUTO or is_url(place) else Path(expand(place, "compilation_cache")).absolute()
        folder = base / f"compiled-{processor()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Who can write there can have us run anything.
        if folder.stat().st_uid != os.getuid() or not os.access(folder, os.W_OK):
            return
        make_room(base)
        jax.config.update(FOLDER, str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_enable_xla_caches", "")  # XLA ends the process where it cannot write
        if not is_url(place):
            mend_by_warnings(folder, folder)
            return
        try:  # JAX would wait longer for a store that does not answer, and make a bucket that is not there
            names(parent := place_of(place, STORE_PATIENCE))
        except UserError as error:
            give_up(folder, error)
            return
        jax.config.update(FOLDER, str(parent / folder.name))
        mend_by_warnings(parent / folder.name, folder)


def give_up(folder: Path, error: Exception) -> None:
    """Has JAX use this host's folder in the place of a store that failed, and says so."""
    known = f"compilation_cache: {error} Until the next start, what is compiled is kept in {folder} alone."
    say(f"gregale: {known}", sys.stderr, flush=True)
    jax.config.update(FOLDER, str(folder))
    compilation_cache.reset_cache()


def processor() -> str:
    """A hash of what this processor can do: a program with instructions that another one lacks would kill it there."""
    with suppress(OSError):
        if found := _PROCESSOR.search(Path("/proc/cpuinfo").read_text(encoding="utf-8")):
            return hashlib.sha256(f"{platform.machine()} {found[1]}".encode()).hexdigest()[:24]
    return hashlib.sha256(platform.machine().encode()).hexdigest()[:24]


def make_room(base: Path) -> None:
    """Deletes what was not used for longest, as far as the file system tells, until `MOST_BYTES` suffice for the rest.

    The bound of JAX's own would take a lock for each program, and a killed process would leave it unusable.
    """
    found = []
    for path in base.glob(f"compiled-*/*{ENTRY}"):
        with suppress(FileNotFoundError):
            status = path.stat()
            found.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    size = sum(entry[1] for entry in found)
    for _, bytes_, path in sorted(found):
        if size <= MOST_BYTES:
            return
        path.unlink(missing_ok=True)
        size -= bytes_


def mend_by_warnings(place: StoragePath, folder: Path) -> None:
    """Deletes an entry when JAX warns that it could not read or write it; the user hears nothing of it.

    JAX compiles the program then, and would neither write over the damaged entry nor stop to read it in later starts.

    - `place`: of the entries
    - `folder`: what JAX uses from then on, if `place` is in a store that fails
    """
    show = warnings.showwarning

    def mend(message, category, filename, lineno, file=None, line=None) -> None:
        if (trouble := _TROUBLE.match(str(message))) is None:
            show(message, category, filename, lineno, file, line)
            return
        with suppress(OSError):
            try:
                for name in names(place):
                    if name.startswith(f"{trouble[1]}-") and name.endswith(ENTRY):
                        (place / name).unlink(missing_ok=True)
            except UserError as error:
                if getattr(jax.config, FOLDER) == str(place):
                    give_up(folder, error)

    warnings.filterwarnings("always", message=_TROUBLE.pattern)
    warnings.showwarning = mend
