"""What is read of an object store, kept on this host's disk: pieces by their checksums, within a bound."""

import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from threading import Lock

from gregale.atomic_files import write_bytes

KEPT = 0.9  # of the bound, when what was not used for longest goes
SCANS = 16  # of the folder, while as much is written as the bound allows
STRIPES = 64


class ChunkCache:
    """A folder of pieces, each named by its SHA-256, which several processes may share.

    A piece is checked when a process first reads it; a damaged one is fetched again. A disk that is full or cannot be
    written to keeps nothing, and everything is fetched.

    Args:
        folder: made when there is something to keep.
        most_bytes: of all pieces together; those that were not read for longest go first. A quarter of the disk if not
            given.
    """

    def __init__(self, folder: Path, most_bytes: int | None = None):
        self._folder, self._given_bytes = folder, most_bytes
        self._sound: set[str] = set()
        self._unseen_bytes: int | None = None  # written since the folder was looked at
        self._room = Lock()
        self._fetching = [Lock() for _ in range(STRIPES)]

    def get(self, sha256: str, fetch: Callable[[], bytes]) -> bytes:
        """The content with this checksum, from the disk or else from `fetch`, which vouches for it."""
        path = self._folder / sha256[:2] / sha256
        with self._fetching[int(sha256[:8], 16) % STRIPES]:  # who wants the same waits for it
            found = self._read(path, sha256)
            if found is None:
                found = fetch()
                self._keep(path, sha256, found)
        return found

    def _read(self, path: Path, sha256: str) -> bytes | None:
        try:
            found = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        if sha256 not in self._sound and hashlib.sha256(found).hexdigest() != sha256:
            return None
        self._sound.add(sha256)
        return found

    def _keep(self, path: Path, sha256: str, content: bytes) -> None:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, content)
            self._sound.add(sha256)
        with self._room:
            self._unseen_bytes = None if self._unseen_bytes is None else self._unseen_bytes + len(content)
            if self._unseen_bytes is None or self._unseen_bytes > self._most_bytes // SCANS:
                self._unseen_bytes = 0
                self._make_room()

    @cached_property
    def _most_bytes(self) -> int:
        if self._given_bytes is not None:
            return self._given_bytes
        there = next(path for path in (self._folder, *self._folder.absolute().parents) if path.exists())
        return shutil.disk_usage(there).total // 4

    def _make_room(self) -> None:
        found = []
        for path in self._folder.glob("??/*"):
            with suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        size = sum(each for _, each, _ in found)
        if size <= self._most_bytes * (1 - 1 / SCANS):  # until the next look
            return
        for _, each, path in sorted(found):
            if size <= KEPT * self._most_bytes * (1 - 1 / SCANS):
                break
            with suppress(OSError):
                path.unlink()
                size -= each
