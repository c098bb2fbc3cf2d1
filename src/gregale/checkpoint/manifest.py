"""The manifest of a checkpoint: checksums of its files or objects, written last and verified before a restore."""

import errno
import hashlib
import json

from gregale.storage import ObjectPath, StoragePath, parallel_map, write_bytes

MANIFEST = "manifest.json"
SHARDS = "shards.json"  # the positions of the shards of all arrays
LEAVES = "leaves.json"
METADATA = "metadata.json"
_FORMAT = 1

FileRecords = dict[str, dict]  # path relative to the checkpoint -> {"bytes": size, "blake2b": digest}


def digest_of(content: bytes | memoryview) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _digest_of_records(records: FileRecords) -> str:
    return digest_of(json.dumps(records, sort_keys=True).encode())


def write_manifest(folder: StoragePath, records: FileRecords) -> None:
    """Write the manifest, which makes the checkpoint in `folder` valid; on a disk it then survives a power failure."""
    manifest = {"format": _FORMAT, "blake2b": _digest_of_records(records), "files": records}
    write_bytes(folder / MANIFEST, json.dumps(manifest, indent=1).encode(), durable=True)


def root_of(folder: StoragePath) -> StoragePath:
    """Return the subfolder with the files of a committed checkpoint; raise LookupError if the manifest names none."""
    files = json.loads((folder / MANIFEST).read_bytes())["files"]
    found = [name.partition("/")[0] for name in files if name.endswith(f"/{METADATA}")]
    return folder / found[0]


def find_damage(folder: StoragePath, part: int = 0, parts: int = 1) -> str | None:
    """Return a text about the first damage of a checkpoint, or None if every file is intact.

    Of several processes that share the reading, process `part` of `parts` checks every `parts`-th file.
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
    expected = [(name, entry["bytes"], entry["blake2b"]) for name, entry in sorted(records.items())[part::parts]]
    found = parallel_map(lambda each: _file_damage(folder, *each), expected)
    return next(filter(None, found), None)


def _file_damage(folder: StoragePath, name: str, size: int, digest: str) -> str | None:
    try:
        found_size, found_digest = measured(folder / name)
    except (FileNotFoundError, IsADirectoryError):
        return f"{name} is missing"
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return f"{name} cannot be read: {error.strerror}"
    if found_size != size:
        return f"{name} has {found_size} bytes of the {size} that were written"
    if found_digest != digest:
        return f"{name} is corrupted: its checksum is not the one in {MANIFEST}"
    return None


def measured(path: StoragePath) -> tuple[int, str]:
    """Return the current size and checksum of a file or an object."""
    if isinstance(path, ObjectPath):
        content = path.read_bytes()
        return len(content), digest_of(content)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return path.stat().st_size, digest
