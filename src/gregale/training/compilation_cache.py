"""A persistent cache of compiled programs, so that the next start need not compile them again.

It uses JAX's own cache, in a folder or in an object store, to which process 0 writes. Its errors never end a run. A
folder that cannot be used is ignored. A store that fails is not used again before the next start. A damaged entry (of
a killed process or a full disk) is deleted, and its program is compiled again.

Compiled programs are machine code: anyone with write access to the cache can run code on the hosts.
"""

import hashlib
import os
import platform
import re
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from operator import truediv
from pathlib import Path

import jax
from etils import epath
from jax.experimental.compilation_cache import compilation_cache

from gregale.atomic_files import remove_oldest, user_cache
from gregale.data.sources.base import expand
from gregale.distributed.config import AUTO
from gregale.errors import UserError
from gregale.storage import EXTRAS, ObjectPath, RetryPolicy, StoragePath, is_url, names, storage_path
from gregale.streams import say

MAX_BYTES = 1 << 30  # of all programs together; the least recently used programs are deleted first
FOLDER = "jax_compilation_cache_dir"  # JAX's name of the setting
ENTRY = "-cache"  # how JAX ends the names of its files
STORE_RETRIES = RetryPolicy(seconds=10, silence_seconds=10)  # short, because a start can compile the programs itself


@dataclass(frozen=True)
class CachePath(ObjectPath):
    """A folder or an entry of the cache in a store, as JAX opens it."""

    retry_policy: RetryPolicy = field(default_factory=lambda: STORE_RETRIES, repr=False, compare=False)

    def joinpath(self, *names: str) -> "CachePath":
        return reduce(truediv, names, self)


_TROUBLE = re.compile(r"Error (?:reading|writing) persistent compilation cache entry for '([^']*)'")
_PROCESSOR = re.compile(r"^(?:flags|Features)\s*:(.*)$", re.MULTILINE)


def keep_compiled(location: str | None) -> None:
    """Set up the cache of compiled programs; call this before anything is compiled.

    - `location`: `compilation_cache` of a configuration: a folder; `auto` for `gregale` in the user's cache directory;
      the URL of a folder in a store, with that directory as a fallback; None for no cache

    A folder that JAX already has, for example from JAX_COMPILATION_CACHE_DIR, stays.
    """
    if location is None or getattr(jax.config, FOLDER) is not None:
        return
    with suppress(OSError, RuntimeError):  # RuntimeError: there is no home directory
        is_own = location == AUTO or is_url(location)
        base = user_cache() if is_own else Path(expand(location, "compilation_cache")).absolute()
        folder = base / f"compiled-{processor()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Another owner of the folder could make this process run any code.
        if folder.stat().st_uid != os.getuid() or not os.access(folder, os.W_OK):
            return
        remove_oldest(base.glob(f"compiled-*/*{ENTRY}"), MAX_BYTES, MAX_BYTES)  # JAX's limit takes a lock a program
        jax.config.update(FOLDER, str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_enable_xla_caches", "")  # XLA aborts if it cannot write its caches
        if not is_url(location):
            delete_damaged_entries(folder, folder)
            return
        epath.register_path_cls([f"{scheme}://" for scheme in EXTRAS])(CachePath)
        try:
            names(parent := storage_path(location, STORE_RETRIES))
        except UserError as error:
            use_local_folder(folder, error)
            return
        jax.config.update(FOLDER, str(parent / folder.name))
        delete_damaged_entries(parent / folder.name, folder)


def use_local_folder(folder: Path, error: Exception) -> None:
    """Make JAX use this host's folder instead of a store that failed, and log the reason."""
    message = f"compilation_cache: {error} Until the next start, compiled programs are kept in {folder} alone."
    say(f"gregale: {message}", sys.stderr, flush=True)
    jax.config.update(FOLDER, str(folder))
    compilation_cache.reset_cache()


def processor() -> str:
    """Return a hash of the processor's features: a program with unknown instructions would crash the process."""
    with suppress(OSError):
        if found := _PROCESSOR.search(Path("/proc/cpuinfo").read_text(encoding="utf-8")):
            return hashlib.sha256(f"{platform.machine()} {found[1]}".encode()).hexdigest()[:24]
    return hashlib.sha256(platform.machine().encode()).hexdigest()[:24]


def delete_damaged_entries(path: StoragePath, folder: Path) -> None:
    """Delete an entry when JAX warns that it cannot read or write it, and hide the warning.

    JAX then compiles the program. It would neither overwrite the damaged entry nor stop reading it in later starts.

    - `path`: the folder of the entries
    - `folder`: the fallback if `path` is in a store that fails
    """
    show = warnings.showwarning

    def delete_entry(message, category, filename, lineno, file=None, line=None) -> None:
        if (trouble := _TROUBLE.match(str(message))) is None:
            show(message, category, filename, lineno, file, line)
            return
        with suppress(OSError):
            try:
                for name in names(path):
                    if name.startswith(f"{trouble[1]}-") and name.endswith(ENTRY):
                        (path / name).unlink(missing_ok=True)
            except UserError as error:
                if getattr(jax.config, FOLDER) == str(path):
                    use_local_folder(folder, error)

    warnings.filterwarnings("always", message=_TROUBLE.pattern)
    warnings.showwarning = delete_entry
