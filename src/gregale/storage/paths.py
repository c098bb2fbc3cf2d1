"""What can be done with a place, whether it is a path or an object; see the package."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from gregale.atomic_files import atomic_replace, temporary_beside
from gregale.atomic_files import write_bytes as write_file
from gregale.errors import UserError
from gregale.storage.filesystems import SCHEMES
from gregale.storage.remote import ObjectPath, Status
from gregale.storage.retry import RetryPolicy

StoragePath = Path | ObjectPath

_NEARLY = re.compile(r"(s3|gs|gcs):(?!//)/?")


def is_url(text: str) -> bool:
    """Whether a text names an object store, one that is known or not, rather than a path."""
    return "://" in text


def storage_path(text: str, patience: RetryPolicy | None = None) -> StoragePath:
    """The place that a text names: `gs://bucket/folder`, `s3://bucket/folder`, or a path.

    Raises `UserError` for the URL of anything else, for one without a bucket, and for what is nearly one.
    """
    if nearly := _NEARLY.match(text):
        meant = f"{nearly[1].replace('gcs', 'gs')}://{text[nearly.end() :]}"
        raise UserError(f"{text} is neither a URL nor likely a path: {meant} names a store, ./{text} a folder.")
    if not is_url(text):
        return Path(text)
    scheme, _, path = text.partition("://")
    if scheme not in SCHEMES:
        known = ", ".join(f"{each}://bucket/folder" for each in SCHEMES)
        raise UserError(f"{text}: {scheme}:// is not a store that is known; these are: {known}, or a path.")
    path = "/".join(part for part in path.split("/") if part)
    if not path:
        raise UserError(f"{text} names no bucket; it has to be like {scheme}://bucket/folder.")
    return ObjectPath(f"{scheme}://{path}", patience or RetryPolicy())


def write_bytes(place: StoragePath, content: bytes) -> None:
    """Writes a file or an object, whole or not at all; the folder of a file has to be there."""
    if isinstance(place, ObjectPath):
        place.write_bytes(content)
    else:
        write_file(place, content)


def create(place: StoragePath, content: bytes) -> bool:
    """Writes a file or an object if there is none; returns whether it did. `content` has to be like no other's."""
    if isinstance(place, ObjectPath):
        return place.create(content)
    temporary = temporary_beside(place)
    try:
        temporary.write_bytes(content)
        os.link(temporary, place)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def read_range(place: StoragePath, start: int, stop: int) -> bytes:
    """The bytes [start, stop), fewer if the content ends before; `FileNotFoundError` if there is none."""
    if isinstance(place, ObjectPath):
        return place.read_range(start, stop)
    with open(place, "rb") as file:
        file.seek(start)
        return file.read(max(stop - start, 0))


def status(place: StoragePath) -> Status | None:
    """Size and identity; None: there is no such file or object."""
    if isinstance(place, ObjectPath):
        return place.status()
    return _of_file(place) if place.is_file() else None


def files_below(folder: StoragePath) -> dict[str, Status]:
    """All files or objects below a folder, sorted, by their names from there on: `a/b.json`. What goes is left out."""
    if isinstance(folder, ObjectPath):
        return folder.files_below()
    found: dict[str, Status] = {}
    for path in sorted(folder.rglob("*")):
        with suppress(FileNotFoundError):  # another process's temporary file, say
            if path.is_file():
                found[path.relative_to(folder).as_posix()] = _of_file(path)
    return dict(sorted(found.items()))


def names(folder: StoragePath) -> list[str]:
    """The names right below a folder, of files or objects and of folders, sorted; none if there is no such folder."""
    if isinstance(folder, ObjectPath):
        return folder.names()
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def upload(file: Path, to: StoragePath) -> None:
    """Copies a file of this host to a place, whole or not at all."""
    if isinstance(to, ObjectPath):
        to.upload(file)
        return
    with atomic_replace(to) as temporary:
        shutil.copyfile(file, temporary)


def download(place: StoragePath, file: Path) -> None:
    """Copies what is at a place to a file of this host, whole or not at all."""
    if isinstance(place, ObjectPath):
        place.download(file)
    else:
        upload(place, file)


def remove_tree(folder: StoragePath) -> None:
    """Deletes a folder with all that is below; nothing happens if there is none."""
    if isinstance(folder, ObjectPath):
        folder.remove_tree()
    elif folder.exists():
        shutil.rmtree(folder)


def _of_file(path: Path) -> Status:
    found = path.stat()
    return Status(found.st_size, f"{found.st_mtime_ns}-{found.st_size}")
