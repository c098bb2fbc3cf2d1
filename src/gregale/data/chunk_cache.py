"""A cache on this host's disk for chunks of an object store, addressed by checksum and limited in size."""

import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from threading import Lock

from gregale.atomic_files import remove_oldest, write_bytes

KEPT = 0.9  # of the limit: eviction ends here
SCANS = 16  # scans of the folder for each limit's worth of bytes written
STRIPES = 64


class ChunkCache:
    """A folder of chunks, each named by its SHA-256, which several processes may share.

    A process checks a chunk on the first read and fetches a damaged chunk again. If the disk is full or read-only, the
    cache stores nothing and every chunk is fetched.

    - `folder`: created when the first chunk is stored.
    - `max_bytes`: the limit of all chunks together; the least recently read chunks are removed first. By default a
      quarter of the disk.
    """

    def __init__(self, folder: Path, max_bytes: int | None = None):
        self._folder, self._given_bytes = folder, max_bytes
        self._sound: set[str] = set()
        self._unseen_bytes: int | None = None  # written since the last scan of the folder
        self._room = Lock()
        self._fetching = [Lock() for _ in range(STRIPES)]

    def get(self, sha256: str, fetch: Callable[[], bytes]) -> bytes:
        """Return the content with this checksum, from the disk or else from `fetch`, which verifies it."""
        path = self._folder / sha256[:2] / sha256
        with self._fetching[int(sha256[:8], 16) % STRIPES]:  # only one thread fetches a chunk; the others wait
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
            if self._unseen_bytes is None or self._unseen_bytes > self._max_bytes // SCANS:
                self._unseen_bytes = 0
                limit = self._max_bytes * (1 - 1 / SCANS)  # until the next scan
                remove_oldest(self._folder.glob("??/*"), limit, KEPT * limit)

    @cached_property
    def _max_bytes(self) -> int:
        if self._given_bytes is not None:
            return self._given_bytes
        there = next(path for path in (self._folder, *self._folder.absolute().parents) if path.exists())
        return shutil.disk_usage(there).total // 4
