"""Objects of a store, and folders of objects, addressed by URL."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import Any, NamedTuple, TypeVar

from gregale.storage.stores import RetryPolicy, client

T = TypeVar("T")

_MIN_BYTES_PER_SECOND = 256 << 10  # of one of many simultaneous requests
_UPLOAD_BYTES = 16 << 20  # a larger file is uploaded in parts of this size
_UPLOADS = 4  # parts of a file at a time


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
        return self._request(lambda store, key: bytes(store.get(key).bytes()))

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def read_range(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop), or fewer if the object ends earlier."""
        if stop <= start:
            return b""
        try:
            return self._request(lambda store, key: bytes(store.get_range(key, start=start, end=stop)))
        except EOFError:
            return b""

    def status(self) -> Status | None:
        """Return size and identity; None if there is no such object."""
        found = self._head()
        return found and _status(found)

    def modified(self) -> float | None:
        """Return the time of the last write, in seconds since 1970 by the store's clock; None if there is no object."""
        found = self._head()
        return found and found["last_modified"].timestamp()

    def is_file(self) -> bool:
        return self.status() is not None

    def is_dir(self) -> bool:
        """Return whether the folder contains an object."""
        return bool(self.names())

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def names(self) -> list[str]:
        """Return the sorted names of the objects and folders in the folder."""
        found = self._request(lambda store, key: store.list_with_delimiter(key))
        paths = {*found["common_prefixes"], *(each["path"] for each in found["objects"])} - {self._key}
        return sorted(path.rpartition("/")[2] for path in paths)

    def files_below(self) -> dict[str, Status]:
        """Return all objects below the folder, by relative name, without objects that stand for folders."""
        found = self._request(lambda store, key: {each["path"]: each for each in store.list(key).collect()})
        folders = {self._key, *(path.rpartition("/")[0] for path in found)}
        return {path[len(self._key) + 1 :]: _status(found[path]) for path in sorted(found.keys() - folders)}

    def write_bytes(self, content: bytes) -> None:
        """Write the object atomically: readers see the old content until the store has all of the new content."""
        self._write(lambda store, key: store.put(key, content, use_multipart=False), len(content))

    def create(self, content: bytes) -> bool:
        """Write the object unless it exists; return whether it was written. `content` must be unique.

        A store without conditional requests (an emulator) always writes.
        """
        try:
            self._write(lambda store, key: store.put(key, content, mode="create"), len(content))
        except FileExistsError:  # perhaps an earlier request of this call wrote it, and its response was lost
            try:
                return self.read_bytes() == content
            except FileNotFoundError:
                return False
        return True

    def upload(self, file: Path) -> None:
        sizes = {"chunk_size": _UPLOAD_BYTES, "max_concurrency": _UPLOADS}
        self._write(lambda store, key: store.put(key, file, **sizes), min(file.stat().st_size, _UPLOAD_BYTES))

    def copy_to(self, other: "ObjectPath") -> None:
        """Copy the object inside the bucket."""
        self._request(lambda store, key: store.copy(key, other._key))

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self._request(lambda store, key: store.delete(key))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_tree(self) -> None:
        """Delete all objects below the folder."""
        parallel_map(lambda name: (self / name).unlink(missing_ok=True), self.files_below())

    def mkdir(self, **_: object) -> None:
        """Do nothing: a folder exists as soon as it contains an object."""

    @property
    def _key(self) -> str:
        return "/".join(self.url.split("/")[3:])

    def _head(self) -> Any:
        try:
            return self._request(lambda store, key: store.head(key))
        except FileNotFoundError:
            return None

    def _request(self, request: Callable[[Any, str], T], **timeouts: float) -> T:
        """Return the response to `request(client, key)`, with retries; see `client` for the timeouts."""
        store = client(self.url, **timeouts or {"read_timeout": self.retry_policy.silence_seconds})
        return self.retry_policy.call(self.url, partial(_interruptible, request, store, self._key))

    def _write(self, request: Callable[[Any, str], Any], size: int) -> None:
        """Call `_request` with a timeout for the size, in a few steps: the client takes an upload for silence."""
        seconds = 1.0
        while seconds * _MIN_BYTES_PER_SECOND < size:
            seconds *= 16
        self._request(request, timeout=2 * self.retry_policy.silence_seconds + seconds)


def parallel_map(function: Callable[..., T], *arguments: Iterable[Any], threads: int = 8) -> list[T]:
    """Return the function's results for all arguments, in order, from several threads."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, *arguments))


def _interruptible(request: Callable[[Any, str], T], store: Any, key: str) -> T:
    """Return the response to a request, from another thread if this is the main one: a client delays signals."""
    if current_thread() is not main_thread():
        return request(store, key)
    response: Future[T] = Future()

    def run() -> None:
        try:
            response.set_result(request(store, key))
        except BaseException as error:
            response.set_exception(error)

    Thread(target=run, daemon=True).start()
    return response.result()


def _status(found: Any) -> Status:
    return Status(found["size"], str(found["e_tag"] or found["version"]).strip('"'))
