"""Token stores: parts of tokens with hashes, masks of supervised tokens, and chunks read of object stores.

The parts of a source depend only on its files. So any process on any host may encode any part, and a later build
continues from the finished parts. A part is a file, `part-00000007.bin`: the ids of its documents, each ended by the
end-of-document token, then the documents' lengths in tokens (int64), all little-endian. Its manifest,
`part-00000007.json`, is written after it and contains a checksum of every chunk.

The worker processes import this module; it must never import JAX.

A store is a folder with these files:

- `part-00000000.bin` and so on: the tokens, little-endian uint16 or uint32 (the smallest that holds the vocabulary);
  `part-00000000.json` and so on: the manifest of each part; see `gregale.data.store`
- `documents.npy`: int64 [document + 1], the index of each document's first token, and the end of the last
- `text_bytes.npy`: int64 [2, correction], the tokens whose bytes of text differ from those of their vocabulary entry;
  only if the tokenizer has such tokens, see `gregale.data.tokenizers`
- `supervised.npy`: int64 [change], the tokens at which the loss begins or ends; only if it is not on all tokens, see
  `gregale.data.store`
- `manifest.json`: counts, types, fingerprints of the tokenizer and the source, sizes and SHA-256 of the other files and
  of all tokens, and the skipped documents. It is written last and completes the store
"""

import base64
import hashlib
import io
import json
import os
import re
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import BinaryIO, NamedTuple

import numpy as np

from gregale.atomic_files import atomic_replace, remove_oldest
from gregale.atomic_files import write_bytes as write_file
from gregale.data.chat.conversation import Conversation, Pair
from gregale.data.chat.renderer import ChatEncoder, Encoded, NotRendered
from gregale.data.sources import Document, Skipped, SourceConfig, SourceRange
from gregale.data.sources.base import BadDocument
from gregale.data.tokenizers import NONE, ByteCountOverrides, Tokenizer, counter_of_names
from gregale.errors import UserError
from gregale.storage import ObjectPath, StoragePath, names, read_range, write_bytes
from gregale.streams import printable

KEPT = 0.9  # of the limit: eviction ends here
SCANS = 16  # scans of the folder for each limit's worth of bytes written
STRIPES = 64


class ChunkCache:
    """A folder of chunks, each named by its SHA-256, which several processes may share.

    A process checks a chunk on the first read and fetches a damaged chunk again. If the disk is full or read-only, the
    cache stores nothing and every chunk is fetched.

    - `folder`: created when the first chunk is stored.
    - `max_bytes`: the limit of all chunks together; the least recently read chunks are removed first. By default a
      quarter of the disk.
    """

    def __init__(self, folder: Path, max_bytes: int | None = None):
        self._folder, self._given_bytes = folder, max_bytes
        self._sound: set[str] = set()
        self._unseen_bytes: int | None = None  # written since the last scan of the folder
        self._room = Lock()
        self._fetching = [Lock() for _ in range(STRIPES)]

    def get(self, sha256: str, fetch: Callable[[], bytes]) -> bytes:
        """Return the content with this checksum, from the disk or else from `fetch`, which verifies it."""
        path = self._folder / sha256[:2] / sha256
        with self._fetching[int(sha256[:8], 16) % STRIPES]:  # only one thread fetches a chunk; the others wait
            found = self._read(path, sha256)
            if found is None:
                found = fetch()
                self._keep(path, sha256, found)
        return found

    def _read(self, path: Path, sha256: str) -> bytes | None:
        try:
            found = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        if sha256 not in self._sound and hashlib.sha256(found).hexdigest() != sha256:
            return None
        self._sound.add(sha256)
        return found

    def _keep(self, path: Path, sha256: str, content: bytes) -> None:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, content)
            self._sound.add(sha256)
        with self._room:
            self._unseen_bytes = None if self._unseen_bytes is None else self._unseen_bytes + len(content)
            if self._unseen_bytes is None or self._unseen_bytes > self._max_bytes // SCANS:
                self._unseen_bytes = 0
                limit = self._max_bytes * (1 - 1 / SCANS)  # until the next scan
                remove_oldest(self._folder.glob("??/*"), limit, KEPT * limit)

    @cached_property
    def _max_bytes(self) -> int:
        if self._given_bytes is not None:
            return self._given_bytes
        there = next(path for path in (self._folder, *self._folder.absolute().parents) if path.exists())
        return shutil.disk_usage(there).total // 4


class LossMask(NamedTuple):
    """A mask of consecutive tokens, by the indices at which it changes; before the first token it is false."""

    changes: np.ndarray  # ascending, int64 [change]

    @staticmethod
    def joined(masks: Iterable[np.ndarray]) -> "LossMask":
        """Return consecutive masks, bool [token] each."""
        found, first = [np.zeros(0, np.int64)], 0
        for mask in masks:
            found.append(np.flatnonzero(np.diff(mask, prepend=False, append=False)) + first)
            first += len(mask)
        return LossMask(np.concatenate(found))

    def at(self, indices: np.ndarray) -> np.ndarray:
        """Return the mask at some indices, bool [index]."""
        return np.searchsorted(self.changes, indices, side="right") % 2 == 1

    def before(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of tokens with loss before some indices, int64 [index]."""
        signed = np.append(0, (self.changes * (1 - 2 * (np.arange(len(self.changes)) % 2 == 0))).cumsum())
        at = np.searchsorted(self.changes, indices)
        return signed[at] + indices * (at % 2)

    def packed(self) -> str:
        """Return the mask as a short text."""
        return base64.b64encode(zlib.compress(np.diff(self.changes, prepend=0).astype("<i8").tobytes())).decode("ascii")

    @staticmethod
    def unpacked(text: str) -> np.ndarray:
        """Return the changes of the mask that `packed` encoded."""
        return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i8").cumsum()


# A later build continues from the parts of an earlier one, so a change of the tasks needs another `store.FORMAT`.
TASK_BYTES = 64 << 20  # of input
LEAST_TASK_BYTES, MANY_TASKS = 8 << 20, 64  # a small source has smaller parts, one for each core
CHUNK_BYTES = 256 << 10  # the smallest read from a part; each has its own checksum
CHUNKS_AT_ONCE = 32
DIGEST = 64  # characters
BATCH_SIZE = 1 << 18  # characters or tokens in one call of a tokenizer
LENGTH = np.dtype("<i8")


@dataclass(frozen=True)
class EncodeTask:
    """Consecutive ranges of a source that one process encodes into one part of its store."""

    number: int
    source: SourceConfig
    parts: tuple[SourceRange, ...]

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)


@dataclass(frozen=True)
class PartManifest:
    """The content of a finished part; ends of documents are tokens."""

    documents: int
    tokens: int
    itemsize: int  # bytes of a token
    skipped: dict  # the fields of `Skipped`
    chunks: str  # the concatenated SHA-256, in hexadecimal digits, of every `CHUNK_BYTES` of the file
    corrections: str | None = None  # packed `ByteCountOverrides`; None if the tokenizer needs none
    special_names: dict[str, int] | None = None  # in the text and encoded as characters, each with its count
    supervised: str | None = None  # the changes of a packed `LossMask`; None if the loss is on all tokens
    unsupervised: dict | None = None  # the documents without a token for the loss, as `skipped`

    @property
    def size_bytes(self) -> int:
        return self.tokens * self.itemsize + self.documents * LENGTH.itemsize


class CorruptPart(Exception):
    """Part `number` does not match its manifest."""

    def __init__(self, number: int):
        super().__init__(f"part {number}")
        self.number = number


def make_tasks(source: SourceConfig) -> list[EncodeTask]:
    """Group the ranges of a source into tasks of about `TASK_BYTES`, or less if the source is small."""
    parts = source.parts()
    wanted = min(TASK_BYTES, max(LEAST_TASK_BYTES, sum(part.size_bytes for part in parts) // MANY_TASKS))
    groups: list[list[SourceRange]] = [[]]
    size = 0
    for part in parts:
        if size >= wanted:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += part.size_bytes
    return [EncodeTask(number, source, tuple(group)) for number, group in enumerate(groups)]


def part_name(number: int) -> str:
    return f"part-{number:08d}.bin"


def part_manifest_name(number: int) -> str:
    return f"part-{number:08d}.json"


def encode_part(task: EncodeTask, tokenizer: Tokenizer, folder: StoragePath) -> None:
    """Encode the documents of a task into a part and write its manifest, unless the part is finished."""
    if read_part_manifest(folder, task.number) is not None:  # another host was faster
        return
    path = folder / part_name(task.number)
    if isinstance(path, ObjectPath):
        with tempfile.TemporaryFile() as file:  # it has no name, so it disappears when the process ends
            manifest = write_part(task, tokenizer, file)
            file.flush()
            path.upload(Path(f"/proc/self/fd/{file.fileno()}"))
    else:
        with atomic_replace(path) as temporary, temporary.open("w+b") as file:
            manifest = write_part(task, tokenizer, file)
            file.flush()
            os.fsync(file.fileno())
    write_part_manifest(folder, task.number, manifest)


def write_part(task: EncodeTask, tokenizer: Tokenizer, output: BinaryIO) -> PartManifest:
    """Write a part into a file; return its manifest."""
    dtype = token_dtype(tokenizer.vocabulary_size).newbyteorder("<")
    lengths, corrections, skipped = [], [], Skipped()
    masks, unsupervised = [], Skipped()
    count, names = counter_of_names(tokenizer), Counter()
    with ChatEncoder(tokenizer) as chat:
        for documents in (each for part in task.parts for each in batches(task.source.read(part, skipped))):
            names += count(each.content for each in documents if isinstance(each.content, str))
            for document, found in zip(documents, encode_documents(documents, tokenizer, chat), strict=True):
                if isinstance(found, BadDocument):
                    task.source.leave_out(found, skipped)
                    continue
                for ids, more_bytes, supervised in (each.ended(tokenizer.end_of_document) for each in found):
                    output.write(ids.astype(dtype).data)
                    lengths.append(len(ids))
                    corrections.append(ByteCountOverrides.of(more_bytes))
                    masks.append(supervised)
                    if supervised is not None and not supervised.any():
                        unsupervised.add(Skipped(1, [place_of(document)]))
    output.write(np.array(lengths, LENGTH).data)
    output.seek(0)
    chunks = "".join(hashlib.sha256(chunk).hexdigest() for chunk in iter(lambda: output.read(CHUNK_BYTES), b""))
    return PartManifest(
        documents=len(lengths),
        tokens=sum(lengths),
        itemsize=dtype.itemsize,
        skipped=asdict(skipped),
        chunks=chunks,
        corrections=None
        if tokenizer.is_exact
        else ByteCountOverrides.joined(zip(lengths, corrections, strict=True)).packed(),
        special_names=dict(names) or None,
        supervised=LossMask.joined(masks).packed() if task.source.has_masks else None,
        unsupervised=asdict(unsupervised) if unsupervised.count else None,
    )


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield documents in groups of about `BATCH_SIZE`, in order."""
    group, size = [], 0
    for document in documents:
        group.append(document)
        size += len(document.content)
        if size >= BATCH_SIZE:
            yield group
            group, size = [], 0
    if group:
        yield group


def encode_documents(
    documents: Sequence[Document], tokenizer: Tokenizer, chat: ChatEncoder
) -> Iterator[list[Encoded] | BadDocument]:
    """Yield each document as tokens, without its end, or the reason why it has none; an empty one is none."""
    texts = iter(tokenizer.encode_counted([each.content for each in documents if isinstance(each.content, str)]))
    for each in documents:
        try:
            if isinstance(each.content, str):
                found = [Encoded(*next(texts))]
            elif isinstance(each.content, Conversation):
                found = [chat.encode(each.content)]
            elif isinstance(each.content, Pair):
                found = encoded_pair(each.content, chat)
            else:
                found = [Encoded(*checked(each, tokenizer))]
        except NotRendered as error:
            yield BadDocument(str(error))
        except BadDocument as bad:
            yield bad
        else:
            yield [one for one in found if len(one.ids)]


def encoded_pair(pair: Pair, chat: ChatEncoder) -> list[Encoded]:
    """Return both conversations as tokens; raise `BadDocument` if one has no target that the loss is on."""
    found = [chat.encode(pair.chosen), chat.encode(pair.rejected)]
    for name, each in zip(("chosen", "rejected"), found, strict=True):
        if each.supervised is None or not each.supervised[1:].any():
            raise BadDocument(f"{pair.location}: `{name}` has no token that the loss is on.")
    return found


def place_of(document: Document) -> str:
    """Return where a document is, for a note."""
    content = document.content
    return content.location if isinstance(content, Conversation | Pair) else f"{document.path}, {document.start}"


def checked(document: Document, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of a document that another program encoded [token], all of them in the vocabulary.

    The text is not available: each id counts as the bytes of its vocabulary entry.
    """
    assert isinstance(document.content, np.ndarray)
    bad = np.flatnonzero((document.content < 0) | (document.content >= tokenizer.vocabulary_size))
    if len(bad):
        raise UserError(
            f"{document.path}, token {document.start + bad[0]}: id {document.content[bad[0]]} is outside the "
            f"vocabulary, 0 to {tokenizer.vocabulary_size - 1}. The file was made with another tokenizer, or is of "
            "another dtype."
        )
    return document.content, np.zeros(len(document.content), np.int64)


def token_dtype(vocabulary_size: int) -> np.dtype:
    """Return the smallest unsigned type that holds every id."""
    return np.dtype(np.uint16 if vocabulary_size <= 1 << 16 else np.uint32)


def write_part_manifest(folder: StoragePath, number: int, manifest: PartManifest) -> None:
    """Write the manifest of a part, which finishes it."""
    fields = {key: value for key, value in asdict(manifest).items() if value is not None}
    fields["store"] = folder.name  # so that a part of another store, which was copied, is encoded again
    content = json.dumps(fields | {"sha256": json_sha256(fields)}).encode()
    write_bytes(folder / part_manifest_name(number), content, durable=True)


def finished_parts(folder: StoragePath) -> set[int]:
    return {int(found[1]) for name in names(folder) if (found := re.fullmatch(r"part-(\d{8})\.json", name))}


def read_part_manifest(folder: StoragePath, number: int) -> PartManifest | None:
    """Return the manifest of a part; None if it is missing, damaged or of another store: the part must be encoded."""
    try:
        content = json.loads((folder / part_manifest_name(number)).read_bytes())
        if content.pop("sha256") != json_sha256(content) or content.pop("store", folder.name) != folder.name:
            return None
        return PartManifest(**content)
    except (FileNotFoundError, ValueError, AttributeError, KeyError, TypeError):
        return None


def read_chunks(folder: StoragePath, number: int, manifest: PartManifest, first: int, count: int) -> bytes:
    """Read consecutive chunks of a part; raise `CorruptPart` if they do not match the manifest."""
    start = first * CHUNK_BYTES
    try:
        data = read_range(folder / part_name(number), start, min(start + count * CHUNK_BYTES, manifest.size_bytes))
    except FileNotFoundError:
        raise CorruptPart(number) from None
    view = memoryview(data)
    found = [hashlib.sha256(view[at : at + CHUNK_BYTES]).hexdigest() for at in range(0, len(data), CHUNK_BYTES)]
    if "".join(found) != manifest.chunks[first * DIGEST : (first + count) * DIGEST]:
        raise CorruptPart(number)
    return data


def read_part(folder: StoragePath, number: int, manifest: PartManifest) -> Iterator[bytes]:
    """Read a whole part in groups of chunks and check each of them; raise `CorruptPart`."""
    for first in range(0, len(manifest.chunks) // DIGEST, CHUNKS_AT_ONCE):
        yield read_chunks(folder, number, manifest, first, CHUNKS_AT_ONCE)


def discard(folder: StoragePath, number: int) -> None:
    """Delete a part, its manifest first, so that it is encoded again."""
    for name in (part_manifest_name(number), part_name(number)):
        (folder / name).unlink(missing_ok=True)


def json_sha256(value) -> str:
    """Return a hash of a JSON value that does not depend on the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


Report = Callable[[str, int, int], None]
"""`report(label, done, total)`: amounts of work, in bytes of input."""


def silent(label: str, done: int, total: int) -> None:
    """Discard a report."""


@contextmanager
def progress_bars() -> Iterator[Report]:
    """Yield a report that draws a bar for each label on standard error."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from gregale.terminal import Console

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks = {}

        def report(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = progress.add_task(printable(label), total=total)
            progress.update(tasks[label], completed=done, total=total)

        yield report


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
        found, size = np.empty(len(indices), self.dtype), CHUNK_BYTES // self.dtype.itemsize
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
            data = self._map(number)[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
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
    corrections: ByteCountOverrides  # the tokens whose bytes of text differ from those of their vocabulary entry
    supervised: LossMask | None = None  # the tokens that the loss is on; None: all of them
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
    corrections = ByteCountOverrides(*load(TEXT_BYTES_NAME)) if TEXT_BYTES_NAME in manifest["files"] else NONE
    supervised = LossMask(load(SUPERVISED_NAME)) if SUPERVISED_NAME in manifest["files"] else None
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
        joined = ByteCountOverrides.joined(
            (each.tokens, ByteCountOverrides.unpacked(each.corrections or "")) for each in manifests
        )
        arrays[TEXT_BYTES_NAME] = np.stack(joined)
    if all(each.supervised is not None for each in manifests):
        firsts = np.array([0, *(each.tokens for each in manifests)]).cumsum()[:-1]
        arrays[SUPERVISED_NAME] = np.concatenate(
            [LossMask.unpacked(each.supervised or "") + first for each, first in zip(manifests, firsts, strict=True)]
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
