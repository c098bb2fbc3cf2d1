"""Files on a disk and objects in a store by one kind of path, and the retries of requests.

Endpoints, regions and credentials are those of the environment and of each store's own tools. The client's own retries
are off, because it does not retry a conditional write, or a listing whose answer breaks off.
"""

import errno
import importlib.util
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import Any, NamedTuple, TypeVar

from gregale.atomic_files import atomic_replace, temporary_beside
from gregale.atomic_files import write_bytes as write_file
from gregale.errors import UserError, install_hint

T = TypeVar("T")
EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure"}  # scheme: extra
_CREDENTIALS = {
    "s3": "the AWS_ variables, ~/.aws, or the role of the machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`, or the machine's account",
    "az": "the AZURE_STORAGE_ variables, or the identity of the machine",
}
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "STORAGE_EMULATOR_HOST", "AZURE_STORAGE_ENDPOINT")
_IDENTITY_PATHS = ("/computeMetadata/", "/metadata/identity/")  # of a cloud machine's own server of tokens
_CONNECT_SECONDS = 10.0
_MAX_DELAY_SECONDS = 10.0
_SHOWN_CHARACTERS = 200
_ANSWER = re.compile(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", re.DOTALL)
# Classes of exceptions, and S3's error codes whose HTTP status is that of any invalid request.
_DENIED = {
    *("PermissionDeniedError", "UnauthenticatedError", "ExpiredToken", "InvalidToken", "TokenRefreshRequired"),
    *("InvalidAccessKeyId", "SignatureDoesNotMatch"),
}


class StoreError(UserError):
    """A store rejected a request, or failed for longer than the retry policy allows.

    - `fact`: one sentence about the failure, for the log of a run that continues; the message adds the remedy
    """

    def __init__(self, fact: str, remedy: str = ""):
        super().__init__(f"{fact} {remedy}".rstrip())
        self.fact = fact


@dataclass(frozen=True)
class RetryPolicy:
    """The limits of retries.

    Retry k waits min(first delay * 2^k, 10) seconds, less a random part of up to one half, so that hosts do not retry
    at the same moment.
    """

    seconds: float = 120.0  # time from the first failure of a request to its last retry
    silence_seconds: float = 30.0  # maximum time without data on a connection before it has failed
    first_delay_seconds: float = 0.2

    def call(self, url: str, request: Callable[[], T]) -> T:
        """Return the result of a request, retrying failures that may pass.

        Raises `FileNotFoundError`, `FileExistsError`, `EOFError` for a range after the end, or `StoreError`.
        """
        max_delay, until = self.first_delay_seconds, None
        while True:
            try:
                return request()
            except Exception as error:
                if (permanent := _permanent_error(url, error)) is not None:
                    raise permanent from error
                delay, now = random.uniform(max_delay / 2, max_delay), time.monotonic()
                until = until or now + self.seconds
                if now + delay > until:
                    raise StoreError(
                        f"{url}: the store did not answer as it should for {self.seconds:g} s ({_text(error)}).",
                        "Nothing that was written before is lost: give the same command again when it is back.",
                    ) from error
            time.sleep(delay)
            max_delay = min(2 * max_delay, _MAX_DELAY_SECONDS)


def client(url: str, **timeouts: float) -> Any:
    """Return the client of a URL's bucket, one for each endpoint and each choice of timeouts.

    - `timeouts`: `read_timeout`, seconds without data, or `timeout`, seconds of a whole request

    Raises `StoreError` if obstore is not installed, or if there are no credentials.
    """
    scheme, _, bucket = url.split("/")[:3]
    if importlib.util.find_spec("obstore") is None:
        raise StoreError(
            f"{url} needs the package obstore, which is not installed. {install_hint(EXTRAS[scheme[:-1]])}"
        )
    try:
        return _client(scheme[:-1], bucket, tuple(timeouts.items()), *map(os.environ.get, _ENDPOINTS))
    except Exception as error:
        raise _access_error(url, error) from error


@cache
def _client(scheme: str, bucket: str, timeouts: tuple[tuple[str, float], ...], *_: object) -> Any:
    from obstore.store import AzureStore, GCSStore, S3Store

    seconds = {"connect_timeout": _CONNECT_SECONDS, "timeout": 86400.0, **dict(timeouts)}
    common: dict[str, Any] = {
        "client_options": {"allow_http": True, **{name: f"{1000 * each:.0f}ms" for name, each in seconds.items()}},
        "retry_config": {"max_retries": 0},
    }
    if scheme == "az":
        return AzureStore(bucket, **common)
    if scheme == "gs":
        if endpoint := os.environ.get("STORAGE_EMULATOR_HOST"):
            common |= {"base_url": endpoint, "bearer_token": "emulator"}
        return GCSStore(bucket, **common)
    from boto3 import Session  # obstore itself does not read ~/.aws
    from obstore.auth.boto3 import Boto3CredentialProvider

    session = Session()
    if session.get_credentials() is None:
        raise PermissionError("Unable to locate credentials")
    credentials = Boto3CredentialProvider(session, ttl=timedelta(minutes=5))
    return S3Store(bucket, credential_provider=credentials, disable_bulk_delete=True, **common)


def _permanent_error(url: str, error: Exception) -> Exception | None:
    """Return the exception for a failure that a retry would repeat; None for other failures, and for unknown ones."""
    text, name = str(error), type(error).__name__
    code = answer[1] if (answer := _ANSWER.search(text)) else ""
    status = int((re.search(r"status code: (\d+)", text) or "00")[1])
    bucket = "/".join(url.split("/")[:3])
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return StoreError(f"{url}: there is no bucket {bucket}.", "Make it, or correct the name.")
    if {code, name} & _DENIED or status in (401, 403) or (status == 400 and "token request" in text):
        return _access_error(url, error)
    if "error sending request" in text and any(path in text for path in _IDENTITY_PATHS):
        return _access_error(url, PermissionError("there are no credentials, and this machine has no identity"))
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(url)
    if status == 412 or code == "BlobAlreadyExists":
        return FileExistsError(url)
    if status == 416 or "range starting at" in text:
        return EOFError(url)
    wrong = isinstance(error, ValueError | TypeError) or "invalid path" in text or "configured region" in text
    if wrong or (400 <= status <= 501 and status not in (408, 409, 429, 500)):
        return StoreError(f"{url}: the store refused the request ({_text(error)}).")
    return None


def _access_error(url: str, error: Exception) -> StoreError:
    scheme, _, bucket = url.split("/")[:3]
    return StoreError(
        f"{url}: the store refused access ({_text(error)}).",
        f"The credentials come from {_CREDENTIALS[scheme[:-1]]}: renew them, or let them read and write "
        f"{scheme}//{bucket}, and give the same command again.",
    )


def _text(error: Exception) -> str:
    """Return an error as one short line: the code and message of the store's answer, if there is one."""
    text = str(error).partition("\n\nDebug source")[0]
    answer = _ANSWER.search(text)
    line = ": ".join(answer.groups()) if answer else text.partition(" - ")[2] or text
    return " ".join(line.split())[:_SHOWN_CHARACTERS].rstrip(".")


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


def digest(*parts: bytes | memoryview) -> str:
    """Return the hash of the concatenated parts: 16 bytes of BLAKE2b, as hexadecimal digits."""
    state = blake2b(digest_size=16)
    for part in parts:
        state.update(part)
    return state.hexdigest()


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


StoragePath = Path | ObjectPath

# Errors of file systems without hard links, such as a mounted bucket.
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EMLINK}
_ALMOST_URL = re.compile(r"(s3|gs|gcs|az):(?!//)/?")


def is_url(text: str) -> bool:
    """Return whether a text is a URL, of a known store or not, rather than a path."""
    return "://" in text


def storage_path(text: str, retry_policy: RetryPolicy | None = None) -> StoragePath:
    """Return the path of a text: `s3://bucket/folder`, `gs://...`, `az://...`, or a path of a disk.

    Raises `UserError` for other URLs, for a URL without a bucket, and for a mistyped URL such as `s3:/bucket`.
    """
    if mistyped := _ALMOST_URL.match(text):
        meant = f"{mistyped[1].replace('gcs', 'gs')}://{text[mistyped.end() :]}"
        raise UserError(f"{text} is neither a URL nor likely a path: {meant} names a store, ./{text} a folder.")
    if not is_url(text):
        return Path(text)
    scheme, _, path = text.partition("://")
    if scheme not in EXTRAS:
        known = ", ".join(f"{each}://bucket/folder" for each in EXTRAS)
        raise UserError(f"{text}: {scheme}:// is not a store that is known; these are: {known}, or a path.")
    path = "/".join(part for part in path.split("/") if part)
    if not path:
        raise UserError(f"{text} names no bucket; it has to be like {scheme}://bucket/folder.")
    return ObjectPath(f"{scheme}://{path}", retry_policy or RetryPolicy())


def write_bytes(path: StoragePath, content: bytes, durable: bool = False) -> None:
    """Write a file or an object atomically; the folder of a file has to exist.

    - `durable`: the file also survives a power failure
    """
    if isinstance(path, ObjectPath):
        path.write_bytes(content)
    else:
        write_file(path, content, durable)


def create(path: StoragePath, content: bytes) -> bool:
    """Write a file or an object unless it exists; return whether it was written. `content` must be unique."""
    if isinstance(path, ObjectPath):
        return path.create(content)
    temporary = temporary_beside(path)
    try:
        temporary.write_bytes(content)
        try:
            os.link(temporary, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with path.open("xb") as file:  # other processes may see it before it is complete
                file.write(content)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def read_range(path: StoragePath, start: int, stop: int) -> bytes:
    """Return the bytes [start, stop), or fewer if the content ends earlier; raise `FileNotFoundError` if absent."""
    if isinstance(path, ObjectPath):
        return path.read_range(start, stop)
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(max(stop - start, 0))


def status(path: StoragePath) -> Status | None:
    """Return size and identity; None if there is no such file or object."""
    if isinstance(path, ObjectPath):
        return path.status()
    with suppress(FileNotFoundError):  # another process deletes it between the two calls
        return _file_status(path) if path.is_file() else None
    return None


def files_below(folder: StoragePath) -> dict[str, Status]:
    """Return all files or objects below a folder, sorted, by relative name (`a/b.json`); skip files that vanish."""
    if isinstance(folder, ObjectPath):
        return folder.files_below()
    found: dict[str, Status] = {}
    for path in sorted(folder.rglob("*")):
        with suppress(FileNotFoundError):  # for example, another process's temporary file
            if path.is_file():
                found[path.relative_to(folder).as_posix()] = _file_status(path)
    return dict(sorted(found.items()))


def names(folder: StoragePath) -> list[str]:
    """Return the sorted names of the files, objects and folders in a folder; none if there is no such folder."""
    if isinstance(folder, ObjectPath):
        return folder.names()
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def upload(file: Path, to: StoragePath) -> None:
    """Copy a file of this host to a path, atomically."""
    if isinstance(to, ObjectPath):
        to.upload(file)
        return
    with atomic_replace(to) as temporary:
        shutil.copyfile(file, temporary)


def remove_tree(folder: StoragePath) -> None:
    """Delete a folder with its content, or a file of a disk; do nothing if there is none."""
    if isinstance(folder, ObjectPath):
        folder.remove_tree()
    elif folder.is_dir():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)


def _file_status(path: Path) -> Status:
    found = path.stat()
    return Status(found.st_size, f"{found.st_mtime_ns}-{found.st_size}")
