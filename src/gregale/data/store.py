"""A token store on disk: the tokens of one source, ready to be mapped into memory.

A store is a folder with these files:

- `tokens.bin`: the ids of all documents, one after the other, each ended by the end-of-document token, as little-endian
  uint16 or uint32 (the smallest that holds the vocabulary)
- `documents.npy`: int64 [document + 1], where in `tokens.bin` each document begins, and the end of the last
- `text_bytes.npy`: int64 [2, correction], which tokens stand for other bytes of text than their pieces have; only where
  the tokenizer has such tokens, see `gregale.data.text_bytes`
- `manifest.json`: counts, types, fingerprints of the tokenizer and the source, sizes and SHA-256 of the others, and
  what could not be read, where that was to be skipped
- `verified.json`: which `tokens.bin` (size, time, inode) was last found to have the manifest's SHA-256
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gregale.data.progress import Report, silent
from gregale.data.text_bytes import NONE, Corrections
from gregale.errors import UserError
from gregale.files import flush, replacing, write_bytes
from gregale.storage import Place

FORMAT = 1
TOKENS_NAME = "tokens.bin"
DOCUMENTS_NAME = "documents.npy"
TEXT_BYTES_NAME = "text_bytes.npy"
MANIFEST_NAME = "manifest.json"
VERIFIED_NAME = "verified.json"
READ_BYTES = 16 << 20
MENDING = "Delete the folder and it will be built again."


@dataclass(frozen=True)
class TokenStore:
    """An open store.

    Attributes:
        folder: where it lies.
        tokens: ids [token], memory-mapped; see `gregale.data.remote_store` for those in an object store.
        offsets: int64 [document + 1]; document d is `tokens[offsets[d]:offsets[d + 1]]`.
        manifest: the content of `manifest.json`.
        corrections: the tokens that stand for other bytes of text than their pieces have.
    """

    folder: Place
    tokens: np.ndarray
    offsets: np.ndarray
    manifest: dict
    corrections: Corrections

    @property
    def counts_text(self) -> bool:
        """Whether the bytes of the text were counted when the store was built, where the tokens do not say them."""
        return TEXT_BYTES_NAME in self.manifest["files"]

    @property
    def content(self) -> dict:
        """Sizes and SHA-256 of the files that tokens and documents are in."""
        return {name: self.manifest["files"][name] for name in (TOKENS_NAME, DOCUMENTS_NAME)}

    def verify(self, label: str = "checking", report: Report = silent) -> None:
        """Reads everything and compares it with the manifest's checksums.

        Args:
            label: of the reports.
            report: told the bytes of tokens read so far.

        Raises:
            UserError: a file is not what was written; names the file.
        """
        folder = Path(str(self.folder))
        note, path = folder / VERIFIED_NAME, folder / TOKENS_NAME
        seen = state_of(path)  # before it is read: a change meanwhile makes another state
        for name in self.manifest["files"].keys() - {TOKENS_NAME}:
            check_sha256(folder / name, self.manifest)
        try:
            check_sha256(path, self.manifest, lambda done: report(label, done, seen["bytes"]))
        except UserError:
            note.unlink(missing_ok=True)
            raise
        if read_note(note) != seen:
            write_note(note, seen)

    def verify_once(self, label: str, report: Report) -> None:
        """Verifies unless this very `tokens.bin` was found to be right before: hashing takes a second a gigabyte.

        What a disk turns over without a change of the file's time is left to `verify`.
        """
        folder = Path(str(self.folder))
        if read_note(folder / VERIFIED_NAME) != state_of(folder / TOKENS_NAME):
            self.verify(label, report)


def state_of(path: Path) -> dict[str, int]:
    """What tells a file from another, or from itself after a change."""
    found = path.stat()
    return {"bytes": found.st_size, "mtime_ns": found.st_mtime_ns, "inode": found.st_ino}


def read_note(path: Path) -> dict | None:
    """What was verified; None if nothing was, or the note is damaged."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def write_note(path: Path, verified: dict[str, int]) -> None:
    """Notes what was verified, whole or not at all. Where the store belongs to another user it is not noted."""
    with suppress(OSError):
        write_bytes(path, json.dumps(verified).encode())


def open_store(folder: Path) -> TokenStore:
    """Maps a finished store into memory; checks all but the tokens' checksum, see `verify` and `verify_once`.

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
    for name in manifest["files"].keys() - {TOKENS_NAME}:
        check_sha256(folder / name, manifest)  # short, and read in full anyway
    offsets = np.load(folder / DOCUMENTS_NAME, allow_pickle=False)
    has_corrections = TEXT_BYTES_NAME in manifest["files"]
    corrections = Corrections(*np.load(folder / TEXT_BYTES_NAME, allow_pickle=False)) if has_corrections else NONE
    tokens = np.memmap(folder / TOKENS_NAME, np.dtype(manifest["dtype"]).newbyteorder("<"), mode="r")
    return TokenStore(folder, tokens, offsets, manifest, corrections)


def check_sha256(path: Path, manifest: dict, read: Callable[[int], None] = lambda done: None) -> None:
    """Raises UserError if a file is not what was written; `read` is told the bytes read so far."""
    expected = manifest["files"][path.name]["sha256"]
    try:
        found = file_sha256(path, read)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}). {MENDING}") from error
    if found != expected:
        raise UserError(f"{path}: its SHA-256 is {found}, the manifest says {expected}. {MENDING}")


def read_manifest(path: Place) -> dict:
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


def finish_store(
    folder: Path,
    offsets: np.ndarray,
    description: dict,
    tokens: dict | None = None,
    corrections: Corrections | None = None,
) -> None:
    """Writes the offsets and, last, the manifest beside a complete `tokens.bin`, all of it flushed to the disk.

    Args:
        folder: a temporary folder; the caller renames it.
        offsets: int64 [document + 1].
        description: the fields of the manifest that say what the store is made of.
        tokens: bytes and SHA-256 of `tokens.bin`, if they are known; it then need not be there.
        corrections: of the tokens' bytes; None if there can be none, or they were not counted.
    """
    if corrections is not None:
        with replacing(folder / TEXT_BYTES_NAME) as temporary, temporary.open("wb") as file:
            np.save(file, np.stack(corrections))
    with replacing(folder / DOCUMENTS_NAME) as temporary, temporary.open("wb") as file:
        np.save(file, offsets)
    files = {TOKENS_NAME: tokens or summed(folder / TOKENS_NAME), DOCUMENTS_NAME: summed(folder / DOCUMENTS_NAME)}
    if corrections is not None:
        files[TEXT_BYTES_NAME] = summed(folder / TEXT_BYTES_NAME)
    counts = {"documents": len(offsets) - 1, "tokens": int(offsets[-1])}
    manifest = {"format": FORMAT, **counts, **description, "files": files}
    content = json.dumps(manifest | {"sha256": json_sha256(manifest)}, indent=1)
    write_bytes(folder / MANIFEST_NAME, content.encode())
    if (folder / TOKENS_NAME).exists():
        write_note(folder / VERIFIED_NAME, state_of(folder / TOKENS_NAME))
    for path in [*folder.iterdir(), folder]:
        flush(path)


def summed(path: Path) -> dict:
    """What a manifest says of a file."""
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def file_sha256(path: Path, read: Callable[[int], None] = lambda done: None) -> str:
    """The SHA-256 of a file; `read` is told the bytes read so far."""
    digest, done = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
            done += len(block)
            read(done)
    return digest.hexdigest()


def json_sha256(value) -> str:
    """A hash of a JSON value that does not depend on the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
