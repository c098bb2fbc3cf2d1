"""The files of sources on a disk or in an object store: list them by pattern, and read them from any offset."""

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

from gregale.data.sources.globs import matches
from gregale.errors import UserError
from gregale.storage import ObjectPath, Status, files_below, is_url, status, storage_path

BUFFER_BYTES = 1 << 20
WILD = re.compile(r"[*?[]")


def files_of(pattern: str) -> dict[str, Status]:
    """Return the files that match a glob pattern, by name."""
    if not is_url(pattern):
        paths = sorted(matches(pattern))
        found = {path: status(storage_path(path)) for path in paths}
        return {path: each for path, each in found.items() if each is not None}
    if not WILD.search(pattern):
        exact = storage_path(pattern)
        alone = status(exact)
        return {str(exact): alone} if alone is not None else {}
    folder = storage_path(pattern[: WILD.search(pattern).start()].rpartition("/")[0])  # type: ignore[union-attr]
    wanted = re.compile(regular(str(storage_path(pattern))))
    named = {f"{folder}/{name}": each for name, each in files_below(folder).items()}
    return {name: named[name] for name in sorted(named) if wanted.fullmatch(name)}


def regular(pattern: str) -> str:
    """Return a glob pattern as a regular expression: `**/` is any folders, `*` and `?` stay in one, `[ab]` chooses."""
    tokens = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]+\])", pattern)
    wild = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        wild.get(token) or (f"[{token[1:].replace('!', '^', 1)}" if token.startswith("[") else re.escape(token))
        for token in tokens
    )


def opened(path: str) -> BinaryIO:
    """Open a file or an object for reads at any offset."""
    found = storage_path(path)
    if not isinstance(found, ObjectPath):
        return open(found, "rb")
    return cast(BinaryIO, io.BufferedReader(RemoteFile(found), BUFFER_BYTES))


def read_bytes(path: str) -> bytes:
    """Return a file's content; raise `UserError` if it cannot be read."""
    with readable(path):
        return storage_path(path).read_bytes()


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Turn an OSError of the system into a `UserError`, whatever `on_bad_document` is: the user can try again later.

    Libraries raise an OSError without a number for damage that they find; that error passes through.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or 'there is no such object'}).") from error
    except OSError as error:
        if error.errno is None:
            raise
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error


class RemoteFile(io.RawIOBase):
    def __init__(self, remote: ObjectPath):
        super().__init__()
        found = remote.status()
        if found is None:
            raise FileNotFoundError(str(remote))
        self._remote, self._size, self._at = remote, found.size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readall(self) -> bytes:  # that of the base class reads 8 KiB at a time
        data = self._remote.read_range(self._at, self._size)
        self._at += len(data)
        return data

    def readinto(self, buffer) -> int:
        data = self._remote.read_range(self._at, min(self._at + len(buffer), self._size))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
