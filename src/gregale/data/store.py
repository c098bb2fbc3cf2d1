"""A token store: the tokens of one source, in a folder on a disk or in an object store.

A store is a folder with these files:

- `part-00000000.bin` and so on: the tokens, little-endian uint16 or uint32 (the smallest that holds the vocabulary);
  `part-00000000.json` and so on: what each part holds; see `gregale.data.parts`
- `documents.npy`: int64 [document + 1], where each document begins among all tokens, and the end of the last
- `text_bytes.npy`: int64 [2, correction], which tokens stand for other bytes of text than their pieces have; only where
  the tokenizer has such tokens, see `gregale.data.text_bytes`
- `manifest.json`: counts, types, fingerprints of the tokenizer and the source, sizes and SHA-256 of the other files and
  of all tokens, and what could not be read, where that was to be skipped. It is written last and completes the store
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

from gregale.atomic_files import flush
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
    read_seal,
)
from gregale.data.progress import Report, silent
from gregale.data.sources import Skipped
from gregale.data.text_bytes import NONE, Corrections
from gregale.errors import UserError
from gregale.storage import ObjectPath, StoragePath, write_bytes

FORMAT = 2
DOCUMENTS_NAME = "documents.npy"
TEXT_BYTES_NAME = "text_bytes.npy"
MANIFEST_NAME = "manifest.json"
TOKENS = "tokens.bin"  # names all tokens in a manifest; format 1 had a file of that name, and runs remember its SHA-256
MAPS_AT_HAND = 64  # of parts on a disk; each takes a file descriptor
MENDING = "Delete the folder and it will be built again."


class PartReader:
    """Reads the parts of a store by chunks and checks each chunk when this process first reads it.

    Args:
        folder: of the store.
        disk: keeps what is read of an object store. Parts on a disk are mapped into memory.
    """

    def __init__(self, folder: StoragePath, disk: ChunkCache):
        self.folder, self._disk = folder, disk
        self._parts: dict[int, tuple[PartManifest, bytearray]] = {}  # with which chunks were checked
        self._map = lru_cache(MAPS_AT_HAND)(lambda number: mapped(Path(str(folder / part_name(number)))))

    def chunk(self, number: int, chunk: int) -> bytes | memoryview:
        """Return a chunk of a part; raise `CorruptPart` if it is not what was sealed."""
        seal, checked = self._part(number)
        sha256 = seal.chunks[chunk * DIGEST : (chunk + 1) * DIGEST]
        if isinstance(self.folder, ObjectPath):
            return self._disk.get(sha256, lambda: read_chunks(self.folder, number, seal, chunk, 1))
        try:
            data = self._map(number)[chunk * parts.CHUNK_BYTES : (chunk + 1) * parts.CHUNK_BYTES]
        except FileNotFoundError:
            raise CorruptPart(number) from None
        if not checked[chunk]:
            if hashlib.sha256(data).hexdigest() != sha256:
                raise CorruptPart(number)
            checked[chunk] = True
        return data

    def _part(self, number: int) -> tuple[PartManifest, bytearray]:
        if number not in self._parts:
            seal = sealed(self.folder, number)
            self._parts[number] = seal, bytearray(len(seal.chunks) // DIGEST)
        return self._parts[number]


def mapped(path: Path) -> memoryview:
    """Map a file into memory."""
    return np.memmap(path, np.uint8, mode="r").data


class PartTokens:
    """All tokens of a store, read as they are asked for.

    Args:
        reader: of the parts.
        bounds: where each part begins among the tokens, and the end of the last, int64 [part + 1].
        dtype: of a token.
    """

    def __init__(self, reader: PartReader, bounds: np.ndarray, dtype: np.dtype):
        self._reader, self._bounds, self.dtype = reader, bounds, dtype

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __getitem__(self, places: slice | np.ndarray) -> np.ndarray:
        """Return the tokens at some places [place]; raise `UserError` if a part is not what was sealed."""
        if isinstance(places, slice):
            places = np.arange(*places.indices(len(self)))
        found, size = np.empty(len(places), self.dtype), parts.CHUNK_BYTES // self.dtype.itemsize
        if not len(places):
            return found
        part, chunk = self._chunks(np.array([places.min(), places.max()]), size)
        runs = [0, len(places)]  # of places in one chunk: mostly all of them
        if part[0] != part[1] or chunk[0] != chunk[1]:
            part, chunk = self._chunks(places, size)
            runs[1:1] = (np.flatnonzero((np.diff(part) != 0) | (np.diff(chunk) != 0)) + 1).tolist()
        with mendable(self._reader.folder):
            for start, stop in pairwise(runs):
                data = self._reader.chunk(int(part[start]), int(chunk[start]))
                tokens = np.frombuffer(data, self.dtype, len(data) // self.dtype.itemsize)
                found[start:stop] = tokens[places[start:stop] - self._bounds[part[start]] - chunk[start] * size]
        return found

    def _chunks(self, places: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the part that each place lies in, and the chunk in that part, int64 [place]."""
        part = np.searchsorted(self._bounds, places, side="right") - 1
        return part, (places - self._bounds[part]) // size


@dataclass(frozen=True)
class TokenStore:
    """An open store.

    Attributes:
        folder: where it lies.
        tokens: ids [token].
        offsets: int64 [document + 1]; document d is `tokens[offsets[d]:offsets[d + 1]]`.
        manifest: the content of `manifest.json`.
        corrections: the tokens that stand for other bytes of text than their pieces have.
    """

    folder: StoragePath
    tokens: PartTokens
    offsets: np.ndarray
    manifest: dict
    corrections: Corrections

    @property
    def content(self) -> dict:
        """Sizes and SHA-256 of all tokens and of the file that says where documents begin."""
        return {name: self.manifest["files"][name] for name in (TOKENS, DOCUMENTS_NAME)}

    @property
    def skipped(self) -> Skipped:
        """What was left out when the store was built."""
        return Skipped(**self.manifest.get("skipped", {}))

    def verify(self, label: str = "checking", report: Report = silent) -> None:
        """Read every byte of every part and compare it with its checksum.

        Args:
            label: of the reports.
            report: told the bytes read so far.

        Raises:
            UserError: a part is not what was written; names it.
        """
        with mendable(self.folder):
            seals = [sealed(self.folder, number) for number in range(len(self.manifest["parts"]))]
            _, found = read_parts(self.folder, seals, lambda done, total: report(label, done, total))
        if found != self.manifest["files"][TOKENS]:
            raise UserError(f"{self.folder}: its parts are not those that the manifest describes. {MENDING}")


def sealed(folder: StoragePath, number: int) -> PartManifest:
    """Return the seal of a part; raise `CorruptPart` if it has none."""
    if (seal := read_seal(folder, number)) is None:
        raise CorruptPart(number)
    return seal


@contextmanager
def mendable(folder: StoragePath) -> Iterator[None]:
    """Say what to do about a damaged part of a complete store."""
    try:
        yield
    except CorruptPart as damaged:
        raise UserError(
            f"{folder / part_name(damaged.number)} is damaged or missing, or its seal beside it is. Delete "
            f"{folder / MANIFEST_NAME}, and the next run encodes this part again."
        ) from None


def read_parts(
    folder: StoragePath, seals: Sequence[PartManifest], read: Callable[[int, int], None]
) -> tuple[np.ndarray, dict]:
    """Read and check all parts of a store.

    - `read(done, total)`: is told the bytes that were read

    Returns:
        The documents' lengths, and what the manifest says of the tokens.

    Raises:
        Damaged: a part is not what was sealed.
    """
    digest, lengths = hashlib.sha256(), bytearray()
    size, done, total = 0, 0, sum(seal.size_bytes for seal in seals)
    for number, seal in enumerate(seals):
        left = seal.tokens * seal.itemsize
        size += left
        for block in read_part(folder, number, seal):
            digest.update(block[:left])
            lengths.extend(block[left:])
            left = max(left - len(block), 0)
            done += len(block)
            read(done, total)
    return np.frombuffer(lengths, LENGTH), {"bytes": size, "sha256": digest.hexdigest()}


def open_store(folder: StoragePath, disk: ChunkCache) -> TokenStore:
    """Open a complete store; tokens are checked when they are read.

    Args:
        folder: where it lies.
        disk: keeps what is read of an object store.

    Raises:
        UserError: the store is missing, damaged or of another version; names the file.
    """
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
    bounds = offsets[np.concatenate([[0], manifest["parts"]]).cumsum(dtype=np.int64)]
    dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
    return TokenStore(folder, PartTokens(PartReader(folder, disk), bounds, dtype), offsets, manifest, corrections)


def read_manifest(path: StoragePath) -> dict:
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


def complete_store(
    folder: StoragePath, seals: Sequence[PartManifest], description: dict, report: Report = silent
) -> None:
    """Read and check all parts, and write what makes them a store; the manifest comes last.

    Args:
        folder: where the parts lie.
        seals: of all parts.
        description: the fields of the manifest that say what the store is made of.
        report: told the bytes of the parts that were read, as `putting together`.

    Raises:
        Damaged: a part is not what was sealed.
    """
    said = report if len(seals) > 1 else silent  # one takes no time
    lengths, tokens = read_parts(folder, seals, lambda done, total: said("putting together", done, total))
    offsets = np.concatenate([[0], lengths]).cumsum(dtype=np.int64)
    arrays = {DOCUMENTS_NAME: offsets}
    if all(seal.corrections is not None for seal in seals):
        joined = Corrections.joined((seal.tokens, Corrections.unpacked(seal.corrections or "")) for seal in seals)
        arrays[TEXT_BYTES_NAME] = np.stack(joined)
    manifest = {
        "format": FORMAT,
        "documents": len(offsets) - 1,
        "tokens": int(offsets[-1]),
        **description,
        "parts": [seal.documents for seal in seals],
        "files": {TOKENS: tokens} | {name: write_array(folder / name, array) for name, array in arrays.items()},
    }
    write_flushed(folder / MANIFEST_NAME, json.dumps(manifest | {"sha256": json_sha256(manifest)}, indent=1).encode())


def write_array(place: StoragePath, array: np.ndarray) -> dict:
    """Write an array; return what a manifest says of the file."""
    file = io.BytesIO()
    np.save(file, array)
    content = file.getvalue()
    write_flushed(place, content)
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def write_flushed(place: StoragePath, content: bytes) -> None:
    """Write a file or an object, whole or not at all, and wait until it is on the disk."""
    write_bytes(place, content)
    if not isinstance(place, ObjectPath):
        flush(place)
        flush(place.parent)


def in_words(skipped: Skipped) -> list[str]:
    """Return how many documents were left out and where the first few stand, a line each."""
    more = skipped.count - len(skipped.first)
    count = f"{skipped.count:,} bad document(s) skipped{', the first' if more else ''}:"
    return [count, *skipped.first, *([f"and {more:,} more"] if more else [])]
