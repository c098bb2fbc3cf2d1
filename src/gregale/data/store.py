"""A token store on disk: the tokens of one source, ready to be mapped into memory.

A store is a folder with three files:

- `tokens.bin`: the ids of all documents, one after the other, each ended by the end-of-document token, as little-endian
  uint16 or uint32 (the smallest that holds the vocabulary)
- `documents.npy`: int64 [document + 1], where in `tokens.bin` each document begins, and the end of the last
- `manifest.json`: counts, types, fingerprints of the tokenizer and the source, sizes and SHA-256 of the other two
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gregale.errors import UserError

FORMAT = 1
TOKENS_NAME = "tokens.bin"
DOCUMENTS_NAME = "documents.npy"
MANIFEST_NAME = "manifest.json"
MENDING = "Delete the folder and it will be built again."


@dataclass(frozen=True)
class TokenStore:
    """An open store.

    Attributes:
        folder: where it lies.
        tokens: ids [token], memory-mapped.
        offsets: int64 [document + 1]; document d is `tokens[offsets[d]:offsets[d + 1]]`.
        manifest: the content of `manifest.json`.
    """

    folder: Path
    tokens: np.ndarray
    offsets: np.ndarray
    manifest: dict

    def verify(self) -> None:
        """Reads everything and compares it with the manifest's checksums.

        Raises:
            UserError: a file is not what was written; names the file.
        """
        for name in self.manifest["files"]:
            check_sha256(self.folder / name, self.manifest)


def open_store(folder: Path) -> TokenStore:
    """Maps a finished store into memory; checks all but the tokens' checksum, see `verify`.

    Raises:
        UserError: the store is missing, damaged or of another version; names the file.
    """
    folder = Path(folder)
    manifest = read_manifest(folder / MANIFEST_NAME)
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path}: missing from the token store. {MENDING}")
        if path.stat().st_size != expected["bytes"]:
            size = path.stat().st_size
            raise UserError(f"{path}: {size} bytes found, the manifest says {expected['bytes']}. {MENDING}")
    check_sha256(folder / DOCUMENTS_NAME, manifest)  # short, and read in full anyway
    offsets = np.load(folder / DOCUMENTS_NAME, allow_pickle=False)
    tokens = np.memmap(folder / TOKENS_NAME, np.dtype(manifest["dtype"]).newbyteorder("<"), mode="r")
    return TokenStore(folder, tokens, offsets, manifest)


def check_sha256(path: Path, manifest: dict) -> None:
    """Raises UserError if a file is not what was written."""
    found, expected = file_sha256(path), manifest["files"][path.name]["sha256"]
    if found != expected:
        raise UserError(f"{path}: its SHA-256 is {found}, the manifest says {expected}. {MENDING}")


def read_manifest(path: Path) -> dict:
    """A manifest that agrees with its own checksum and this program's version of the format."""
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{path}: missing; this folder is no token store.") from error
    except ValueError as error:
        raise UserError(f"{path}: damaged, not JSON ({error}). {MENDING}") from error
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != json_sha256(manifest):
        raise UserError(f"{path}: it does not agree with its own checksum. {MENDING}")
    if manifest["format"] != FORMAT:
        raise UserError(f"{path}: format {manifest['format']}, this program reads format {FORMAT}. {MENDING}")
    return manifest


def finish_store(folder: Path, offsets: np.ndarray, description: dict) -> None:
    """Writes the offsets and, last, the manifest beside a complete `tokens.bin`, all of it flushed to the disk.

    Args:
        folder: a temporary folder; the caller renames it.
        offsets: int64 [document + 1].
        description: the fields of the manifest that say what the store is made of.
    """
    np.save(folder / DOCUMENTS_NAME, offsets)
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": file_sha256(folder / name)}
        for name in (TOKENS_NAME, DOCUMENTS_NAME)
    }
    counts = {"documents": len(offsets) - 1, "tokens": int(offsets[-1])}
    manifest = {"format": FORMAT, **counts, **description, "files": files}
    content = json.dumps(manifest | {"sha256": json_sha256(manifest)}, indent=1)
    (folder / MANIFEST_NAME).write_text(content, encoding="utf-8")
    for path in [*folder.iterdir(), folder]:
        flush(path)


def flush(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_sha256(value) -> str:
    """A hash of a JSON value that does not depend on the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
