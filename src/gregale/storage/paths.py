"""Functions that work on files of a disk and on objects of a store alike; see the package."""

import errno
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from gregale.atomic_files import atomic_replace, temporary_beside
from gregale.atomic_files import write_bytes as write_file
from gregale.errors import UserError
from gregale.storage.remote import ObjectPath, Status
from gregale.storage.stores import EXTRAS, RetryPolicy

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
