"""Compiled programs, kept in a folder so that the next start reads them instead of compiling them anew.

JAX's own cache does it, and `gregale.services.compiled_store` brings it into an object store. Nothing here may end a
run: a folder that cannot be used is not, and an entry that cannot be read, of a killed process or a full disk, is
deleted and compiled again.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import warnings
from contextlib import suppress
from pathlib import Path

import jax

from gregale.data.sources.base import expand
from gregale.files import user_cache
from gregale.services.compiled_store import Mirror, kept_in, let_every_process_write
from gregale.services.distributed import AUTO
from gregale.storage import Patience, is_url
from gregale.storage import place as place_of

MOST_BYTES = 1 << 30  # of all programs together; those that were not used for longest go first
FOLDER = "jax_compilation_cache_dir"  # JAX's name of the setting
ENTRY = "-cache"  # how JAX ends the names of its files
STORE_PATIENCE = Patience(seconds=10, silence_seconds=10)  # a start does not wait long for what it can compile

_TROUBLE = re.compile(r"Error (?:reading|writing) persistent compilation cache entry for '([^']*)'")
_PROCESSOR = re.compile(r"^(?:flags|Features)\s*:(.*)$", re.MULTILINE)


def keep_compiled(place: str | None) -> None:
    """Keeps compiled programs from one start to the next; to be called before anything is compiled.

    - `place`: `compilation_cache` of a configuration: a folder; `auto`: `gregale` in the user's cache directory; the
      URL of a folder in a store: there and in that directory; None: nothing is kept

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
        mirror, is_one_of_several = None, jax.distributed.is_initialized()
        if is_url(place) or is_one_of_several:
            mirror = Mirror(folder, place_of(place, STORE_PATIENCE) / folder.name if is_url(place) else None)
        if is_one_of_several:
            let_every_process_write()
        jax.config.update(FOLDER, str(folder) if mirror is None else kept_in(mirror))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_enable_xla_caches", "")  # XLA ends the process where it cannot write
        mend_by_warnings(folder, mirror)


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


def mend_by_warnings(folder: Path, mirror: Mirror | None) -> None:
    """Deletes an entry when JAX warns that it could not read or write it; the user hears nothing of it.

    JAX compiles the program then, and would neither write over the damaged entry nor stop to read it in later starts.
    """
    show = warnings.showwarning

    def mend(message, category, filename, lineno, file=None, line=None) -> None:
        if (trouble := _TROUBLE.match(str(message))) is None:
            show(message, category, filename, lineno, file, line)
            return
        for path in folder.glob(f"{trouble[1]}-*{ENTRY}"):
            with suppress(OSError):
                path.unlink()
                if mirror is not None:
                    mirror.forget(path.name)

    warnings.filterwarnings("always", message=_TROUBLE.pattern)
    warnings.showwarning = mend
