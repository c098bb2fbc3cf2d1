"""Compiled programs of several hosts: in the folder of each, and in an object store if there is one.

JAX asks for a program by its key when it needs it. What is not in this host's folder is then fetched from the store,
and what was compiled is written to the folder and, in the background, to the store: each an object of its own, whole or
not there. JAX keeps programs in whatever `etils.epath` has a class for, so this module registers one:

    jax.config.update("jax_compilation_cache_dir", kept_in(Mirror(folder, place("gs://bucket/programs"))))

By itself JAX writes programs in process 0 alone, for the sake of file systems that do not like to be written to by
many. Where hosts have disks of their own, all others would compile at every start; so `let_every_process_write`. Files
come into the folder by a rename here, so that it may be shared.

A store that fails is not asked again, and never ends a run: programs are compiled, and kept in the folder.

Whoever can write to the store can have the hosts run anything, as a program is machine code.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import jax
from etils import epath

from gregale.errors import UserError
from gregale.files import write_bytes
from gregale.storage import Place, download, status
from gregale.storage import write_bytes as write
from gregale.streams import say

ALL_WRITE_BEFORE = (0, 11)  # versions of JAX in which `let_every_process_write` is known to be right
_PREFIX = "gregale-programs://"


def to_stderr(text: str) -> None:
    say(f"gregale: {text}", sys.stderr, flush=True)


@dataclass
class Mirror:
    """A folder of this host and a place in a store that have the same files, as far as they were asked for.

    - `store`: None: there is only the folder
    - `report`: told in one line when the store fails
    """

    folder: Path
    store: Place | None
    report: Callable[[str], None] = to_stderr
    _damaged: set[str] = field(default_factory=set)
    _works: bool = True
    _lock: Lock = field(default_factory=Lock)
    _writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "programs"))

    def has(self, name: str) -> bool:
        """Whether the file is in the folder, if need be fetched from the store."""
        path = self.folder / name
        if path.exists():
            return True
        if self.store is None or name in self._damaged or not self._works:
            return False
        try:
            download(self.store / name, path)
        except FileNotFoundError:
            return False
        except (UserError, OSError) as error:
            self._give_up(error)
            return False
        return True

    def put(self, name: str, content: bytes) -> None:
        """Writes the file to the folder, and in the background to the store."""
        write_bytes(self.folder / name, content)
        if self.store is not None and self._works:
            self._writer.submit(self._upload, self.store / name, content)

    def forget(self, name: str) -> None:
        """The file was damaged, and deleted here: what comes in its place goes over the one in the store."""
        self._damaged.add(name)

    def wait(self) -> None:
        """Returns when the store has what was written; the interpreter also waits for that when it ends."""
        self._writer.submit(lambda: None).result()

    def _upload(self, to: Place, content: bytes) -> None:
        """Another process may have been first, unless it was damaged."""
        if not self._works:
            return
        try:
            if to.name in self._damaged or status(to) is None:
                write(to, content)
        except (UserError, OSError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        with self._lock:
            was_working, self._works = self._works, False
        if was_working:
            self.report(
                f"compilation_cache: {error} Until the next start, what is compiled is kept in {self.folder} alone."
            )


def let_every_process_write() -> None:
    """Has JAX write what it compiles in this process, whichever of several it is."""
    from jax._src import compilation_cache, compiler  # nothing public decides who writes

    def write(key: str, seconds: float, name: str, backend: Any, executable: Any, callbacks: Sequence[Any]) -> None:
        if callbacks:  # they are of this process
            return
        try:
            compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))
        except Exception as error:
            warnings.warn(
                f"Error writing persistent compilation cache entry for '{name}': {type(error).__name__}: {error}",
                stacklevel=1,
            )

    if jax.__version_info__ < ALL_WRITE_BEFORE:
        compiler._cache_write = write


_MIRRORS: dict[str, Mirror] = {}  # by what JAX is given, which can only be a text


def kept_in(mirror: Mirror) -> str:
    """What JAX is to be given for the folder of its cache."""
    name = f"{_PREFIX}{mirror.folder}"
    _MIRRORS[name] = mirror
    return name


@epath.register_path_cls(_PREFIX)
class _Programs:
    """The folder, as far as JAX's cache uses one."""

    def __init__(self, name: str):
        self._mirror = _MIRRORS[name]

    def mkdir(self, **_: object) -> None:
        """It is there."""

    def joinpath(self, *names: str) -> Any:
        """Itself, as `epath.Path` asks for when it has made it, or a file."""
        return self / names[0] if names else self

    def __truediv__(self, name: str) -> _Program:
        return _Program(self._mirror, name)


@dataclass(frozen=True)
class _Program:
    """A file of the folder."""

    mirror: Mirror
    name: str

    def exists(self) -> bool:
        return self.mirror.has(self.name)

    def read_bytes(self) -> bytes:
        return (self.mirror.folder / self.name).read_bytes()

    def write_bytes(self, content: bytes) -> None:
        self.mirror.put(self.name, content)
