"""The files of sources on a disk or in an object store: list them by pattern, and read them from any offset."""

import glob
import io
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

from gregale.errors import UserError
from gregale.storage import ObjectPath, Status, files_below, is_url, status, storage_path

BUFFER_BYTES = 1 << 20
WILD = re.compile(r"[*?[]")

Folder = tuple[int, int]
"""What tells a folder from others: its device and its inode."""


def matches(pattern: str, root: str = "") -> Iterator[str]:
    """Yield the matches, as `glob.glob(pattern, root_dir=root, recursive=True)` does, in no particular order.

    `**` does not follow a link into a folder that contains the link. Folders that match `**` itself are left out.
    """
    parts = pattern.split("/")
    if "**" not in parts:
        yield from glob.glob(pattern, root_dir=root)
        return
    at = parts.index("**")
    before, after = "/".join(parts[:at]), "/".join(parts[at + 1 :]).lstrip("/")
    if at + 1 < len(parts) and not after:  # `**/` matches only folders
        return
    if at > 0:
        before = before or "/"
    for base in glob.glob(before, root_dir=root) if before else [""]:
        for folder in _folders(os.path.join(root, base)):
            name = os.path.join(base, folder)
            for found in matches(after or "*", os.path.join(root, name)):
                yield os.path.join(name, found)


def each_once(paths: Iterable[str]) -> list[str]:
    """Return the paths in order, without further names of the same file.

    Of several names for one file, keep one without links if possible, with the fewest folders; of equal ones the first.
    """
    names: dict[object, list[str]] = {}
    for path in paths:
        names.setdefault(_identity(path), []).append(path)

    def detour(path: str) -> tuple[bool, int]:
        return os.path.realpath(path) != os.path.abspath(path), path.count("/")

    kept = {min(each, key=detour) if len(each) > 1 else each[0] for each in names.values()}
    return [path for each in names.values() for path in each if path in kept]


def _folders(base: str, below: str = "", inside: frozenset[Folder] = frozenset()) -> Iterator[str]:
    """Yield a folder and its subfolders, by their paths from the base, without hidden ones."""
    here = os.path.join(base, below)
    try:
        found = os.stat(here or ".")
        with os.scandir(here or ".") as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".")]
    except OSError:  # not a folder, or listing is not permitted
        return
    if (identity := (found.st_dev, found.st_ino)) in inside:
        return
    yield below
    for name in names:
        if os.path.isdir(os.path.join(here, name)):
            yield from _folders(base, os.path.join(below, name), inside | {identity})


def _identity(path: str) -> object:
    """Return what is equal for two names of one file; some file systems invent inodes, so not the inode alone."""
    try:
        found = os.stat(path)
    except OSError:
        return path
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


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
    if isinstance(found, ObjectPath):
        return cast(BinaryIO, io.BufferedReader(RemoteFile(found), BUFFER_BYTES))
    descriptor = os.open(found, os.O_RDONLY | os.O_NONBLOCK)  # a pipe in place of the file could wait for ever
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{path} is a pipe or a device now, and was a file when it was listed. Put the file back.")
    return os.fdopen(descriptor, "rb")


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

    def readall(self) -> bytes:  # that of the base class reads 8 KiB at a time
        data = self._remote.read_range(self._at, self._size)
        self._at += len(data)
        return data

    def readinto(self, buffer) -> int:
        data = self._remote.read_range(self._at, min(self._at + len(buffer), self._size))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
