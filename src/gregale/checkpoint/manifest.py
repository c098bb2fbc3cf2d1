"""Checksums of a checkpoint's files or objects: written last, verified before anything is read."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gregale.atomic_files import atomic_replace, flush
from gregale.errors import UserError
from gregale.storage import ObjectPath, StoragePath

MANIFEST = "manifest.json"
PIECES = "pieces.json"  # where which piece of which array is
_FORMAT = 1
_HASHING_THREADS = 4  # hashlib releases the interpreter lock

FileRecords = dict[str, dict]  # path relative to the checkpoint -> {"bytes": size, "blake2b": digest}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def digest_of(content: bytes | memoryview) -> str:
    """The checksum of what is in memory."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _digest_of_records(records: FileRecords) -> str:
    return digest_of(json.dumps(records, sort_keys=True).encode())


def write_manifest(folder: StoragePath, records: FileRecords) -> None:
    """Writes the manifest; `folder` is complete once this returns, and on a disk power may fail then."""
    manifest = {"format": _FORMAT, "blake2b": _digest_of_records(records), "files": records}
    content = json.dumps(manifest, indent=1).encode()
    if isinstance(folder, ObjectPath):
        (folder / MANIFEST).write_bytes(content)
        return
    with atomic_replace(folder / MANIFEST) as temporary:
        temporary.write_bytes(content)
        flush(temporary)
    flush(folder)


def read_records(folder: StoragePath) -> FileRecords:
    """What a sound manifest names."""
    return json.loads((folder / MANIFEST).read_bytes())["files"]


def root_of(folder: StoragePath, records: FileRecords) -> StoragePath:
    """Where the files that a manifest names are; raises `UserError` if an earlier version of Gregale wrote them."""
    for name in records:
        own, _, last = name.partition("/")
        if last == PIECES:
            return folder / own
    raise UserError(
        f"The checkpoint {folder} has Orbax's format, which this version of Gregale does not read. Commit 87fb450 of "
        f"Gregale reads it: go on with that one, or have it export the model, which `gregale import` reads."
    )


def find_damage(folder: StoragePath, part: int = 0, parts: int = 1) -> str | None:
    """What is wrong with a checkpoint, in words, or None when every file is as it was written.

    Args:
        folder: the committed checkpoint.
        part: number of the first file to check.
        parts: check every `parts`-th file from there on; processes share the reading.

    Raises `UserError` if an earlier version of Gregale wrote it.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        version, digest, records = manifest["format"], manifest["blake2b"], manifest["files"]
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} is truncated or corrupted"
    if version != _FORMAT:
        return f"{MANIFEST} has format {version}; this version reads format {_FORMAT}"
    if digest != _digest_of_records(records):
        return f"{MANIFEST} is corrupted: its checksum is not the one it states"
    root_of(folder, records)
    expected = [(name, entry["bytes"], entry["blake2b"]) for name, entry in sorted(records.items())[part::parts]]
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        return next((damage for damage in pool.map(lambda one: _file_damage(folder, *one), expected) if damage), None)


def _file_damage(folder: StoragePath, name: str, size: int, digest: str) -> str | None:
    try:
        found_size, found_digest = _measured(folder / name)
    except (FileNotFoundError, IsADirectoryError):
        return f"{name} is missing"
    if found_size != size:
        return f"{name} has {found_size} bytes of the {size} that were written"
    if found_digest != digest:
        return f"{name} is corrupted: its checksum is not the one in {MANIFEST}"
    return None


def _measured(place: StoragePath) -> tuple[int, str]:
    """Size and checksum of what is there now."""
    if isinstance(place, ObjectPath):
        content = place.read_bytes()
        return len(content), digest_of(content)
    return place.stat().st_size, _digest(place)
