"""An object in a store, or all objects whose names begin with a folder's."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gregale.atomic_files import atomic_replace
from gregale.storage.filesystems import filesystem
from gregale.storage.retry import Beyond, RetryPolicy, StoreError, call_with_retries

Request = Callable[[Any, str], Coroutine]

_SLOWEST_BYTES_PER_SECOND = 256 << 10  # of one of many requests at once
_REMOVING_THREADS = 8


class Status(NamedTuple):
    """Size in bytes, and a text that changes when the content does."""

    size: int
    identity: str


@dataclass(frozen=True)
class ObjectPath:
    """An object, or a folder of objects, by its URL: `s3://bucket/runs/first/config.yaml`.

    Reading what is not there raises `FileNotFoundError`; a store that refuses, or is out of order for too long,
    `StoreError`. Any thread may ask.
    """

    url: str
    patience: RetryPolicy = field(default=RetryPolicy(), repr=False, compare=False)

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> ObjectPath:
        return replace(self, url=f"{self.url}/{name.strip('/')}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        return replace(self, url=self.url.rpartition("/")[0])

    def with_name(self, name: str) -> ObjectPath:
        return self.parent / name

    def absolute(self) -> ObjectPath:
        return self

    def read_bytes(self) -> bytes:
        return self._ask(lambda system, path: system._cat_file(path, max_concurrency=1))  # 1: in one request

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def read_range(self, start: int, stop: int) -> bytes:
        """The bytes [start, stop), fewer if the object ends before."""
        if stop <= start:
            return b""
        try:
            return self._ask(lambda system, path: system._cat_file(path, start=start, end=stop))
        except Beyond:
            return b""

    def status(self) -> Status | None:
        """None: there is no such object."""
        try:
            found = self._ask(lambda system, path: system._info(path))
        except FileNotFoundError:
            return None
        return _status(found) if found["type"] == "file" else None

    def modified(self) -> float | None:
        """When the object was last written, in seconds since 1970 by the store's clock; None: there is none."""
        try:
            found = self._ask(lambda system, path: system._info(path))
        except FileNotFoundError:
            return None
        when = found.get("LastModified") or found.get("updated")
        return None if when is None else (datetime.fromisoformat(when) if isinstance(when, str) else when).timestamp()

    def is_file(self) -> bool:
        return self.status() is not None

    def is_dir(self) -> bool:
        """Whether there is an object below."""
        return bool(self.names())

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def names(self) -> list[str]:
        """The names right below: of objects and of folders, sorted."""
        try:
            found = self._ask(lambda system, path: system._ls(path, detail=True))
        except FileNotFoundError:
            return []
        prefix = f"{self._path}/"
        return sorted(_below(prefix, (each["name"].rstrip("/") for each in found)))

    def files_below(self) -> dict[str, Status]:
        """All objects below, by their names from here on."""
        try:
            found = self._ask(lambda system, path: system._find(path, detail=True))
        except FileNotFoundError:
            return {}
        prefix = f"{self._path}/"
        return {name: _status(found[prefix + name]) for name in sorted(_below(prefix, found)) if name[-1] != "/"}

    def write_bytes(self, content: bytes) -> None:
        """Whole or not at all: the object is the old one until the store has all of the new one."""
        self._write(lambda system, path: system._pipe_file(path, content), len(content))

    def create(self, content: bytes) -> bool:
        """Writes the object if there is none; returns whether it did. `content` has to be like no other's.

        A store without conditional requests (an emulator) writes in any case.
        """
        try:
            self._write(lambda system, path: system._pipe_file(path, content, mode="create"), len(content))
        except FileExistsError:  # maybe by a request of this call, whose answer was lost
            try:
                return self.read_bytes() == content
            except FileNotFoundError:
                return False
        return True

    def upload(self, file: Path) -> None:
        """Writes the object from a file."""
        self._write(lambda system, path: system._put_file(str(file), path), os.path.getsize(file))

    def download(self, file: Path) -> None:
        """Writes a file from the object, whole or not at all."""
        with atomic_replace(file) as temporary:
            self._ask(lambda system, path: system._get_file(path, str(temporary)))

    def copy_to(self, other: ObjectPath) -> None:
        """Has the store copy the object."""
        self._ask(lambda system, path: system._cp_file(path, other._path))

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self._ask(lambda system, path: system._rm_file(path))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_tree(self) -> None:
        """Deletes all objects below."""
        with ThreadPoolExecutor(_REMOVING_THREADS) as pool:
            list(pool.map(lambda name: (self / name).unlink(missing_ok=True), self.files_below()))

    def mkdir(self, **_: object) -> None:
        """Nothing: a folder is there as soon as an object is in it."""

    @property
    def _path(self) -> str:
        return self.url.partition("://")[2]

    def _ask(self, request: Request, seconds: float | None = None) -> Any:
        """What the store answers to a request, which takes a file system and the path in it; `seconds`: at most."""
        from fsspec.asyn import sync

        system = filesystem(self.url, self.patience.silence_seconds)
        once = partial(sync, system.loop, request, system, self._path, timeout=seconds)
        return call_with_retries(self.url, self.patience, once)

    def _write(self, request: Request, size: int) -> None:
        """As `_ask`, in a time that the size allows: nothing else ends a connection that takes no more."""
        try:
            self._ask(request, seconds=2 * self.patience.silence_seconds + size / _SLOWEST_BYTES_PER_SECOND)
        except FileNotFoundError as error:
            bucket = "/".join(self.url.split("/")[:3])
            raise StoreError(f"{self.url}: there is no bucket {bucket}.", "Make it, or correct the name.") from error


def _status(found: dict) -> Status:
    return Status(int(found["size"]), str(found.get("ETag") or found.get("etag") or found.get("generation")))


def _below(prefix: str, paths: Iterable[str]) -> list[str]:
    return [path.removeprefix(prefix) for path in paths if path.startswith(prefix) and path != prefix]
