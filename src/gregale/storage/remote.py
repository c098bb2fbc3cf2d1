"""Objects of a store, and folders of objects, addressed by URL."""

import os
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gregale.storage.filesystems import filesystem
from gregale.storage.retry import RangeBeyondEnd, RetryPolicy, StoreError, call_with_retries

Request = Callable[[Any, str], Coroutine]

_MIN_BYTES_PER_SECOND = 256 << 10  # of one of many simultaneous requests
_REMOVING_THREADS = 8


class Status(NamedTuple):
    """The size in bytes, and a text that changes with the content."""

    size: int
    identity: str


@dataclass(frozen=True)
class ObjectPath:
    """An object, or a folder of objects, by its URL: `s3://bucket/runs/first/config.yaml`.

    Reading an absent object raises `FileNotFoundError`. A request that the store rejects, or that still fails after
    the retries, raises `StoreError`. Any thread may call the methods.
    """

    url: str
    retry_policy: RetryPolicy = field(default=RetryPolicy(), repr=False, compare=False)

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "ObjectPath":
        return replace(self, url=f"{self.url}/{name.strip('/')}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "ObjectPath":
        return replace(self, url=self.url.rpartition("/")[0])

    def with_name(self, name: str) -> "ObjectPath":
        return self.parent / name

    def absolute(self) -> "ObjectPath":
        return self

    def read_bytes(self) -> bytes:
        return self._request(lambda system, path: system._cat_file(path, max_concurrency=1))  # 1: one request

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def read_range(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop), or fewer if the object ends earlier."""
        if stop <= start:
            return b""
        try:
            return self._request(lambda system, path: system._cat_file(path, start=start, end=stop))
        except RangeBeyondEnd:
            return b""

    def status(self) -> Status | None:
        """Return size and identity; None if there is no such object."""
        found = self._info()
        return _status(found) if found and found["type"] == "file" else None

    def modified(self) -> float | None:
        """Return the time of the last write, in seconds since 1970 by the store's clock; None if there is no object."""
        found = self._info() or {}
        when = found.get("LastModified") or found.get("updated")
        return None if when is None else (datetime.fromisoformat(when) if isinstance(when, str) else when).timestamp()

    def is_file(self) -> bool:
        return self.status() is not None

    def is_dir(self) -> bool:
        """Return whether the folder contains an object."""
        return bool(self.names())

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def names(self) -> list[str]:
        """Return the sorted names of the objects and folders in the folder."""
        try:
            found = self._request(lambda system, path: system._ls(path, detail=True))
        except FileNotFoundError:
            return []
        prefix = f"{self._path}/"
        return sorted(_below(prefix, (each["name"].rstrip("/") for each in found)))

    def files_below(self) -> dict[str, Status]:
        """Return all objects below the folder, by relative name."""
        try:
            found = self._request(lambda system, path: system._find(path, detail=True))
        except FileNotFoundError:
            return {}
        prefix = f"{self._path}/"
        return {name: _status(found[prefix + name]) for name in sorted(_below(prefix, found)) if name[-1] != "/"}

    def write_bytes(self, content: bytes) -> None:
        """Write the object atomically: readers see the old content until the store has all of the new content."""
        self._write(lambda system, path: system._pipe_file(path, content), len(content))

    def create(self, content: bytes) -> bool:
        """Write the object unless it exists; return whether it was written. `content` must be unique.

        A store without conditional requests (an emulator) always writes.
        """
        try:
            self._write(lambda system, path: system._pipe_file(path, content, mode="create"), len(content))
        except FileExistsError:  # perhaps an earlier request of this call wrote it, and its response was lost
            try:
                return self.read_bytes() == content
            except FileNotFoundError:
                return False
        return True

    def upload(self, file: Path) -> None:
        self._write(lambda system, path: system._put_file(str(file), path), os.path.getsize(file))

    def copy_to(self, other: "ObjectPath") -> None:
        """Copy the object inside the store."""
        self._request(lambda system, path: system._cp_file(path, other._path))

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self._request(lambda system, path: system._rm_file(path))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_tree(self) -> None:
        """Delete all objects below the folder."""
        with ThreadPoolExecutor(_REMOVING_THREADS) as pool:
            list(pool.map(lambda name: (self / name).unlink(missing_ok=True), self.files_below()))

    def mkdir(self, **_: object) -> None:
        """Do nothing: a folder exists as soon as it contains an object."""

    @property
    def _path(self) -> str:
        return self.url.partition("://")[2]

    def _info(self) -> dict | None:
        try:
            return self._request(lambda system, path: system._info(path))
        except FileNotFoundError:
            return None

    def _request(self, request: Request, seconds: float | None = None) -> Any:
        """Return the response to `request(file system, path)`, with retries; `seconds` limits one attempt."""
        from fsspec.asyn import sync

        system = filesystem(self.url, self.retry_policy.silence_seconds)
        attempt = partial(sync, system.loop, request, system, self._path, timeout=seconds)
        return call_with_retries(self.url, self.retry_policy, attempt)

    def _write(self, request: Request, size: int) -> None:
        """Call `_request` with a timeout for the size: nothing else ends an upload whose connection stalls."""
        try:
            self._request(request, seconds=2 * self.retry_policy.silence_seconds + size / _MIN_BYTES_PER_SECOND)
        except FileNotFoundError as error:
            bucket = "/".join(self.url.split("/")[:3])
            raise StoreError(f"{self.url}: there is no bucket {bucket}.", "Make it, or correct the name.") from error


def _status(found: dict) -> Status:
    return Status(int(found["size"]), str(found.get("ETag") or found.get("etag") or found.get("generation")))


def _below(prefix: str, paths: Iterable[str]) -> list[str]:
    return [path.removeprefix(prefix) for path in paths if path.startswith(prefix) and path != prefix]
