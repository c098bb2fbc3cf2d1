"""The manifest of a checkpoint, the names of a run's checkpoints, and the rules that select those to keep.

The manifest has checksums of the checkpoint's files or objects. It is written last and verified before a restore. This
module does not import JAX, so that programs that only read a run start fast.
"""

import errno
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gregale.errors import KeyedError
from gregale.settings import Settings, setting, shown, whole
from gregale.storage import ObjectPath, StoragePath, digest, names, parallel_map, status, write_bytes

MANIFEST = "manifest.json"
SHARDS = "shards.json"  # the positions of the shards of all arrays
LEAVES = "leaves.json"
METADATA = "metadata.json"
_FORMAT = 1
UNITS = {"s": 1, "m": 60, "h": 3600}
_TIME = re.compile(r"([0-9]{1,9})([smh])")
_COMMITTED = re.compile(r"step-(\d{8,})")

FileRecords = dict[str, dict]  # path relative to the checkpoint -> {"bytes": size, "blake2b": digest}


def _digest_of_records(records: FileRecords) -> str:
    return digest(json.dumps(records, sort_keys=True).encode())


def write_manifest(folder: StoragePath, records: FileRecords) -> None:
    """Write the manifest, which makes the checkpoint in `folder` valid; on a disk it then survives a power failure."""
    manifest = {"format": _FORMAT, "blake2b": _digest_of_records(records), "files": records}
    write_bytes(folder / MANIFEST, json.dumps(manifest, indent=1).encode(), durable=True)


def root_of(folder: StoragePath) -> StoragePath:
    """Return the subfolder with the files of a committed checkpoint; raise LookupError if the manifest names none."""
    found = [name.partition("/")[0] for name in read_manifest(folder)["files"] if name.endswith(f"/{METADATA}")]
    return folder / found[0]


def read_manifest(folder: StoragePath) -> dict[str, Any]:
    return json.loads((folder / MANIFEST).read_bytes())


def read_metadata(folder: StoragePath) -> dict[str, Any]:
    """Return the metadata of a committed checkpoint; raise OSError, ValueError or LookupError if it is damaged."""
    return json.loads((root_of(folder) / METADATA).read_bytes())


def find_damage(folder: StoragePath, part: int = 0, parts: int = 1) -> str | None:
    """Return a text about the first damage of a checkpoint, or None if every file is intact.

    Of several processes that share the reading, process `part` of `parts` checks every `parts`-th file.
    """
    try:
        manifest = read_manifest(folder)
        version, stated, records = manifest["format"], manifest["blake2b"], manifest["files"]
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} is truncated or corrupted"
    if version != _FORMAT:
        return f"{MANIFEST} has format {version}; this version reads format {_FORMAT}"
    if stated != _digest_of_records(records):
        return f"{MANIFEST} is corrupted: its checksum is not the one it states"
    expected = [(name, entry["bytes"], entry["blake2b"]) for name, entry in sorted(records.items())[part::parts]]
    found = parallel_map(lambda each: _file_damage(folder, *each), expected)
    return next(filter(None, found), None)


def _file_damage(folder: StoragePath, name: str, size: int, stated: str) -> str | None:
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
    if found_digest != stated:
        return f"{name} is corrupted: its checksum is not the one in {MANIFEST}"
    return None


def measured(path: StoragePath) -> tuple[int, str]:
    """Return the current size and checksum of a file or an object."""
    if isinstance(path, ObjectPath):
        content = path.read_bytes()
        return len(content), digest(content)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
    return path.stat().st_size, found.hexdigest()


@dataclass(frozen=True)
class CheckpointConfig(Settings):
    """The interval between checkpoints and the number to keep."""

    every: int | str = setting(
        1000,
        "between checkpoints: steps, or a time (15m)",
        range=whole(1),
        aliases=("checkpoint_every", "ckpt_interval", "interval"),
    )
    keep_last: int = setting(
        3, "Number of newest checkpoints to keep.", range=whole(1), aliases=("max_to_keep", "keep")
    )
    keep_every: int | None = setting(None, "Keep multiples of this many steps for ever.", range=whole(1))

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.every, str) and not self.seconds:
            raise KeyedError(
                "every", f"is {shown(self.every)}", "; it is a number of steps, or a time such as 90s, 15m or 2h."
            )

    @property
    def steps(self) -> int | None:
        """Return the steps between checkpoints; None if a time is between them."""
        return None if isinstance(self.every, str) else self.every

    @property
    def seconds(self) -> int | None:
        """Return the seconds between checkpoints; None if steps are between them."""
        found = _TIME.fullmatch(self.every) if isinstance(self.every, str) else None
        return int(found[1]) * UNITS[found[2]] if found else None


@dataclass(frozen=True)
class ExportConfig(Settings):
    """Folders for transformers that a run writes of its checkpoints, as `gregale export` does."""

    every: int | None = setting(None, "steps between Hugging Face folders; null: none", range=whole(1), by_topic=True)
    keep_last: int | None = setting(None, "number of newest folders to keep; null: all", range=whole(1), by_topic=True)

    def is_due(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint from a path below the checkpoint folder; None for other paths."""
    match = _COMMITTED.fullmatch(name.partition("/")[0])
    return int(match.group(1)) if match else None


def committed_steps(directory: StoragePath) -> list[int]:
    """Return the steps with a committed checkpoint (intact or not), in ascending order.

    A checkpoint is valid if its manifest exists, which is written last and deleted first.
    """
    folders = [name for name in names(directory) if step_of(name) is not None]
    valid = parallel_map(lambda name: status(directory / name / MANIFEST) is not None, folders)
    return sorted(step_of(name) or 0 for name, is_valid in zip(folders, valid, strict=True) if is_valid)


def without_manifest(directory: StoragePath) -> list[str]:
    """Return the names of checkpoint folders without a manifest, by ascending step."""
    committed = {folder_name(step) for step in committed_steps(directory)}
    return [name for name in names(directory) if step_of(name) is not None and name not in committed]


def superfluous(steps: Iterable[int], saved: int, config: CheckpointConfig) -> list[int]:
    """Return the steps to delete after `saved` has been committed.

    Steps after `saved` remain if a run resumed from an earlier checkpoint. They do not belong to this run's history,
    but would be its newest state.
    """
    history = sorted(step for step in steps if step <= saved)
    kept = set(history[-config.keep_last :])
    if config.keep_every is not None:
        kept |= {step for step in history if step % config.keep_every == 0}
    return [step for step in steps if step not in kept]
