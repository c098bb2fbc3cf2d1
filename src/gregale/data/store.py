"""A token store: the tokens of one source, in a folder on a disk or in an object store.

A store is a folder with these files:

- `part-00000000.bin` and so on: the tokens, little-endian uint16 or uint32 (the smallest that holds the vocabulary);
  `part-00000000.json` and so on: the manifest of each part; see `gregale.data.parts`
- `documents.npy`: int64 [document + 1], the index of each document's first token, and the end of the last
- `text_bytes.npy`: int64 [2, correction], the tokens whose bytes of text differ from those of their vocabulary entry;
  only if the tokenizer has such tokens, see `gregale.data.text_bytes`
- `supervised.npy`: int64 [change], the tokens at which the loss begins or ends; only if it is not on all tokens, see
  `gregale.data.supervised`
- `manifest.json`: counts, types, fingerprints of the tokenizer and the source, sizes and SHA-256 of the other files and
  of all tokens, and the skipped documents. It is written last and completes the store
"""

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from gregale.data import parts
from gregale.data.chunk_cache import ChunkCache
from gregale.data.parts import (
    DIGEST,
    LENGTH,
    CorruptPart,
    PartManifest,
    json_sha256,
    part_name,
    read_chunks,
    read_part,
    read_part_manifest,
)
from gregale.data.progress import Report, silent
from gregale.data.sources import Skipped
from gregale.data.supervised import Supervised
from gregale.data.text_bytes import NONE, Corrections
from gregale.errors import UserError
from gregale.storage import ObjectPath, StoragePath, write_bytes

FORMAT = 3
DOCUMENTS_NAME = "documents.npy"
TEXT_BYTES_NAME = "text_bytes.npy"
SUPERVISED_NAME = "supervised.npy"
MANIFEST_NAME = "manifest.json"
TOKENS = "tokens.bin"  # names all tokens in a manifest; runs record the SHA-256 of format 1's file of that name
MAPS_AT_HAND = 64  # of parts on a disk; each takes a file descriptor
MENDING = "Delete the folder and it will be built again."


class PartTokens:
    """All tokens of a store, read by chunks on access; each chunk is checked on the first read of this process.

    - `folder`: the folder of the store.
    - `disk`: a local cache of data from an object store. Parts on a disk are mapped into memory.
    - `bounds`: the index of each part's first token, and the end of the last, int64 [part + 1].
    - `dtype`: type of a token.
    """

    def __init__(self, folder: StoragePath, disk: ChunkCache, bounds: np.ndarray, dtype: np.dtype):
        self._folder, self._disk, self._bounds, self.dtype = folder, disk, bounds, dtype
        self._parts: dict[int, tuple[PartManifest, bytearray]] = {}  # manifest, and a flag for each checked chunk
        self._map = lru_cache(MAPS_AT_HAND)(lambda number: mapped(Path(str(folder / part_name(number)))))

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __getitem__(self, indices: slice | np.ndarray) -> np.ndarray:
        """Return the tokens at some indices [index]; raise `UserError` if a part is damaged."""
        if isinstance(indices, slice):
            indices = np.arange(*indices.indices(len(self)))
        found, size = np.empty(len(indices), self.dtype), parts.CHUNK_BYTES // self.dtype.itemsize
        if not len(indices):
            return found
        part, chunk = self._chunks(np.array([indices.min(), indices.max()]), size)
        runs = [0, len(indices)]  # of indices in one chunk: usually all of them
        if part[0] != part[1] or chunk[0] != chunk[1]:
            part, chunk = self._chunks(indices, size)
            runs[1:1] = (np.flatnonzero((np.diff(part) != 0) | (np.diff(chunk) != 0)) + 1).tolist()
        with mendable(self._folder):
            for start, stop in pairwise(runs):
                data = self._chunk(int(part[start]), int(chunk[start]))
                tokens = np.frombuffer(data, self.dtype, len(data) // self.dtype.itemsize)
                found[start:stop] = tokens[indices[start:stop] - self._bounds[part[start]] - chunk[start] * size]
        return found

    def _chunks(self, indices: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the part of each index, and the chunk in that part, int64 [index]."""
        part = np.searchsorted(self._bounds, indices, side="right") - 1
        return part, (indices - self._bounds[part]) // size

    def _chunk(self, number: int, chunk: int) -> bytes | memoryview:
        """Return a chunk of a part; raise `CorruptPart` if it does not match the manifest."""
        if number not in self._parts:
            manifest = require_manifest(self._folder, number)
            self._parts[number] = manifest, bytearray(len(manifest.chunks) // DIGEST)
        manifest, checked = self._parts[number]
        sha256 = manifest.chunks[chunk * DIGEST : (chunk + 1) * DIGEST]
        if isinstance(self._folder, ObjectPath):
            return self._disk.get(sha256, lambda: read_chunks(self._folder, number, manifest, chunk, 1))
        try:
            data = self._map(number)[chunk * parts.CHUNK_BYTES : (chunk + 1) * parts.CHUNK_BYTES]
        except FileNotFoundError:
            raise CorruptPart(number) from None
        if not checked[chunk]:
            if hashlib.sha256(data).hexdigest() != sha256:
                raise CorruptPart(number)
            checked[chunk] = True
        return data


def mapped(path: Path) -> memoryview:
    """Map a file into memory; an empty file cannot be mapped."""
    return np.memmap(path, np.uint8, mode="r").data if path.stat().st_size else memoryview(b"")


@dataclass(frozen=True)
class TokenStore:
    """An open store."""

    folder: StoragePath  # the folder of the store
    tokens: PartTokens  # ids [token]
    offsets: np.ndarray  # int64 [document + 1]; document d is `tokens[offsets[d]:offsets[d + 1]]`
    manifest: dict  # the content of `manifest.json`
    corrections: Corrections  # the tokens whose bytes of text differ from those of their vocabulary entry
    supervised: Supervised | None = None  # the tokens that the loss is on; None: all of them
    is_new: bool = False  # whether this process waited until it was built

    @property
    def content(self) -> dict:
        """Return sizes and SHA-256 of all tokens, of the documents' offsets and, if there are any, of masks."""
        names = (TOKENS, DOCUMENTS_NAME, SUPERVISED_NAME)
        return {name: self.manifest["files"][name] for name in names if name in self.manifest["files"]}

    @property
    def skipped(self) -> Skipped:
        """Return the documents that the build left out."""
        return Skipped(**self.manifest.get("skipped", {}))

    @property
    def unsupervised(self) -> Skipped:
        """Return the documents without a token for the loss."""
        return Skipped(**self.manifest.get("unsupervised", {}))

    def verify(self, label: str = "checking", report: Report = silent) -> None:
        """Read every byte of every part and compare it with its checksum; raise `UserError` that names a damaged part.

        - `report`: receives the number of bytes read, as `label`
        """
        with mendable(self.folder):
            manifests = [require_manifest(self.folder, number) for number in range(len(self.manifest["parts"]))]
            _, found = read_parts(self.folder, manifests, lambda done, total: report(label, done, total))
        if found != self.manifest["files"][TOKENS]:
            raise UserError(f"{self.folder}: its parts are not those that the manifest describes. {MENDING}")


def require_manifest(folder: StoragePath, number: int) -> PartManifest:
    """Return the manifest of a part; raise `CorruptPart` if it has none."""
    if (manifest := read_part_manifest(folder, number)) is None:
        raise CorruptPart(number)
    return manifest


@contextmanager
def mendable(folder: StoragePath) -> Iterator[None]:
    """Turn `CorruptPart` in a complete store into a `UserError` that names the remedy."""
    try:
        yield
    except CorruptPart as damaged:
        raise UserError(
            f"{folder / part_name(damaged.number)} is damaged or missing, or its manifest beside it is. Delete "
            f"{folder / MANIFEST_NAME}, and the next run encodes this part again."
        ) from None


def read_parts(
    folder: StoragePath, manifests: Sequence[PartManifest], read: Callable[[int, int], None]
) -> tuple[np.ndarray, dict]:
    """Read and check all parts of a store.

    - `read(done, total)`: receives the number of bytes read

    Returns the documents' lengths, and the manifest's entry for the tokens.
    Raises `CorruptPart` if a part does not match its manifest.
    """
    digest, lengths = hashlib.sha256(), bytearray()
    size, done, total = 0, 0, sum(manifest.size_bytes for manifest in manifests)
    for number, manifest in enumerate(manifests):
        left = manifest.tokens * manifest.itemsize
        size += left
        for block in read_part(folder, number, manifest):
            digest.update(block[:left])
            lengths.extend(block[left:])
            left = max(left - len(block), 0)
            done += len(block)
            read(done, total)
    return np.frombuffer(lengths, LENGTH), {"bytes": size, "sha256": digest.hexdigest()}


def open_store(folder: StoragePath, disk: ChunkCache) -> TokenStore:
    """Open a complete store; raise `UserError` if it is missing, damaged or of another version. Reads check tokens."""
    manifest = read_manifest(folder / MANIFEST_NAME)

    def load(name: str) -> np.ndarray:
        path, sha256 = folder / name, manifest["files"][name]["sha256"]

        def read() -> bytes:
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                raise UserError(f"{path}: missing from the token store. {MENDING}") from None
            except OSError as error:
                raise UserError(f"{path}: cannot be read ({error.strerror}). {MENDING}") from error
            if (found := hashlib.sha256(content).hexdigest()) != sha256:
                raise UserError(f"{path}: its SHA-256 is {found}, the manifest says {sha256}. {MENDING}")
            return content

        content = disk.get(sha256, read) if isinstance(folder, ObjectPath) else read()
        return np.load(io.BytesIO(content), allow_pickle=False)

    offsets = load(DOCUMENTS_NAME)
    corrections = Corrections(*load(TEXT_BYTES_NAME)) if TEXT_BYTES_NAME in manifest["files"] else NONE
    supervised = Supervised(load(SUPERVISED_NAME)) if SUPERVISED_NAME in manifest["files"] else None
    bounds = offsets[np.concatenate([[0], manifest["parts"]]).cumsum(dtype=np.int64)]
    dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
    return TokenStore(folder, PartTokens(folder, disk, bounds, dtype), offsets, manifest, corrections, supervised)


def read_manifest(path: StoragePath) -> dict:
    """Return a manifest that matches its own checksum and this program's format version."""
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


def complete_store(
    folder: StoragePath, manifests: Sequence[PartManifest], description: dict, report: Report = silent
) -> None:
    """Read and check all parts, and write the other files of the store; the manifest is written last.

    - `description`: the fields of the manifest that describe the store's source
    - `report`: receives the number of bytes read, as `putting together`

    Raises `CorruptPart` if a part does not match its manifest.
    """
    shown = report if len(manifests) > 1 else silent  # a single part takes no time
    lengths, tokens = read_parts(folder, manifests, lambda done, total: shown("putting together", done, total))
    offsets = np.concatenate([[0], lengths]).cumsum(dtype=np.int64)
    arrays = {DOCUMENTS_NAME: offsets}
    if all(each.corrections is not None for each in manifests):
        joined = Corrections.joined((each.tokens, Corrections.unpacked(each.corrections or "")) for each in manifests)
        arrays[TEXT_BYTES_NAME] = np.stack(joined)
    if all(each.supervised is not None for each in manifests):
        firsts = np.array([0, *(each.tokens for each in manifests)]).cumsum()[:-1]
        arrays[SUPERVISED_NAME] = np.concatenate(
            [Supervised.unpacked(each.supervised or "") + first for each, first in zip(manifests, firsts, strict=True)]
        )
    manifest = {
        "format": FORMAT,
        "documents": len(offsets) - 1,
        "tokens": int(offsets[-1]),
        **description,
        "parts": [each.documents for each in manifests],
        "files": {TOKENS: tokens} | {name: write_array(folder / name, array) for name, array in arrays.items()},
    }
    content = json.dumps(manifest | {"sha256": json_sha256(manifest)}, indent=1).encode()
    write_bytes(folder / MANIFEST_NAME, content, durable=True)


def write_array(path: StoragePath, array: np.ndarray) -> dict:
    """Write an array; return the manifest's entry for the file."""
    file = io.BytesIO()
    np.save(file, array)
    content = file.getvalue()
    write_bytes(path, content, durable=True)
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def format_skipped(skipped: Skipped, what: str = "bad document(s) skipped") -> list[str]:
    """Return the number of documents and the locations of the first few, a line each; `what`: names them."""
    more = skipped.count - len(skipped.first)
    count = f"{skipped.count:,} {what}{', the first' if more else ''}:"
    return [count, *skipped.first, *([f"and {more:,} more"] if more else [])]
