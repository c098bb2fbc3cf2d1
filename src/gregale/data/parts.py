"""The parts of a token store: each is encoded by one process and then sealed.

The parts of a source follow from its files alone. So any process on any host may encode any of them, and a later build
goes on from those that are sealed. A part is a file, `part-00000007.bin`: the ids of its documents, each ended by the
end-of-document token, then the documents' lengths in tokens (int64), all little-endian. Its seal, `part-00000007.json`,
is written after it and says what it holds, with a checksum of every chunk.

The worker processes import this module; it must never import JAX.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gregale.atomic_files import atomic_replace
from gregale.data.sources import Document, Skipped, SourceConfig, SourceRange
from gregale.data.text_bytes import Corrections
from gregale.data.tokenizers import Tokenizer
from gregale.errors import UserError
from gregale.storage import ObjectPath, StoragePath, names, read_range, write_bytes

TASK_BYTES = 64 << 20  # of input
LEAST_TASK_BYTES, MANY_TASKS = 8 << 20, 64  # a small source has smaller parts, so that there is one for each core
CHUNK_BYTES = 256 << 10  # what is read of a part at least, and has a checksum of its own
CHUNKS_AT_ONCE = 32
DIGEST = 64  # characters
BATCH_SIZE = 1 << 18  # characters that a tokenizer is given at once, or tokens
LENGTH = np.dtype("<i8")


@dataclass(frozen=True)
class EncodeTask:
    """Consecutive parts of a source, for one process to encode into one part of its store."""

    number: int
    source: SourceConfig
    parts: tuple[SourceRange, ...]

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)


@dataclass(frozen=True)
class PartManifest:
    """What a finished part holds.

    Attributes:
        documents: how many.
        tokens: how many, ends of documents included.
        itemsize: bytes of a token.
        skipped: the fields of `Skipped`.
        chunks: the SHA-256 of every `CHUNK_BYTES` of the file, one after the other in hexadecimal digits.
        corrections: packed `Corrections`; None of a tokenizer that has none.
    """

    documents: int
    tokens: int
    itemsize: int
    skipped: dict
    chunks: str
    corrections: str | None = None

    @property
    def size_bytes(self) -> int:
        """Of the file."""
        return self.tokens * self.itemsize + self.documents * LENGTH.itemsize


class CorruptPart(Exception):
    """A part is not what its seal says; `number`: which."""

    def __init__(self, number: int):
        super().__init__(f"part {number}")
        self.number = number


def make_tasks(source: SourceConfig) -> list[EncodeTask]:
    """Groups the parts of a source into tasks of about `TASK_BYTES`, or fewer if it is small."""
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


def seal_name(number: int) -> str:
    return f"part-{number:08d}.json"


def encode_part(task: EncodeTask, tokenizer: Tokenizer, folder: StoragePath) -> None:
    """Encodes the documents of a task into a part and seals it, unless that is done.

    Args:
        task: what to encode.
        tokenizer: by what.
        folder: of the store.
    """
    if read_seal(folder, task.number) is not None:  # another host was faster
        return
    place = folder / part_name(task.number)
    if isinstance(place, ObjectPath):
        with tempfile.TemporaryFile() as file:  # it has no name, and so goes however this process ends
            seal = write_part(task, tokenizer, file)
            file.flush()
            place.upload(Path(f"/proc/self/fd/{file.fileno()}"))
    else:
        with atomic_replace(place) as temporary, temporary.open("w+b") as file:
            seal = write_part(task, tokenizer, file)
            file.flush()
            os.fsync(file.fileno())
    write_seal(folder, task.number, seal)


def write_part(task: EncodeTask, tokenizer: Tokenizer, output: BinaryIO) -> PartManifest:
    """Writes a part into a file; returns what its seal says."""
    dtype = token_dtype(tokenizer.vocabulary_size).newbyteorder("<")
    lengths, corrections, skipped = [], [], Skipped()
    for part in task.parts:
        for documents in batches(task.source.read(part, skipped)):
            for ids, more_bytes in encode_documents(documents, tokenizer):
                if len(ids):
                    output.write(np.append(ids, tokenizer.end_of_document).astype(dtype).data)
                    lengths.append(len(ids) + 1)
                    corrections.append(Corrections.of(more_bytes))
    output.write(np.array(lengths, LENGTH).data)
    chunks = "".join(hashlib.sha256(chunk).hexdigest() for chunk in chunks_of(output))
    packed = None if tokenizer.is_exact else Corrections.joined(zip(lengths, corrections, strict=True)).packed()
    return PartManifest(len(lengths), sum(lengths), dtype.itemsize, asdict(skipped), chunks, packed)


def chunks_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the chunks of a file, from its beginning."""
    file.seek(0)
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in groups of about `BATCH_SIZE`, in order."""
    group, size = [], 0
    for document in documents:
        group.append(document)
        size += len(document.content)
        if size >= BATCH_SIZE:
            yield group
            group, size = [], 0
    if group:
        yield group


def encode_documents(documents: Sequence[Document], tokenizer: Tokenizer) -> list[tuple[np.ndarray, np.ndarray]]:
    """The ids of each document [token], without its end, and the differences of `Tokenizer.encode_counted`."""
    encoded = iter(tokenizer.encode_counted([each.content for each in documents if isinstance(each.content, str)]))
    return [next(encoded) if isinstance(each.content, str) else checked(each, tokenizer) for each in documents]


def checked(document: Document, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a document that another program has encoded [token], all of them in the vocabulary.

    Its text is not there: each id counts as the bytes of its piece.
    """
    assert not isinstance(document.content, str)
    bad = np.flatnonzero((document.content < 0) | (document.content >= tokenizer.vocabulary_size))
    if len(bad):
        raise UserError(
            f"{document.path}, token {document.start + bad[0]}: id {document.content[bad[0]]} is outside the "
            f"vocabulary, 0 to {tokenizer.vocabulary_size - 1}. The file was made with another tokenizer, or is of "
            "another dtype."
        )
    return document.content, np.zeros(len(document.content), np.int64)


def token_dtype(vocabulary_size: int) -> np.dtype:
    """The smallest unsigned type that holds every id."""
    return np.dtype(np.uint16 if vocabulary_size <= 1 << 16 else np.uint32)


def write_seal(folder: StoragePath, number: int, seal: PartManifest) -> None:
    """Seal a part."""
    content = {key: value for key, value in asdict(seal).items() if value is not None}
    write_bytes(folder / seal_name(number), json.dumps(content | {"sha256": json_sha256(content)}).encode())


def sealed_parts(folder: StoragePath) -> set[int]:
    """Return the numbers of the parts that have a seal."""
    return {int(found[1]) for name in names(folder) if (found := re.fullmatch(r"part-(\d{8})\.json", name))}


def read_seal(folder: StoragePath, number: int) -> PartManifest | None:
    """The seal of a part; None if it has none, or a damaged one, so that it has to be encoded."""
    try:
        content = json.loads((folder / seal_name(number)).read_bytes())
        if content.pop("sha256") != json_sha256(content):
            return None
        return PartManifest(**content)
    except (FileNotFoundError, ValueError, AttributeError, KeyError, TypeError):
        return None


def read_chunks(folder: StoragePath, number: int, seal: PartManifest, first: int, count: int) -> bytes:
    """Read some chunks of a part, one after the other; raise `CorruptPart` if they are not what was sealed."""
    start = first * CHUNK_BYTES
    try:
        data = read_range(folder / part_name(number), start, min(start + count * CHUNK_BYTES, seal.size_bytes))
    except FileNotFoundError:
        raise CorruptPart(number) from None
    view = memoryview(data)
    found = [hashlib.sha256(view[at : at + CHUNK_BYTES]).hexdigest() for at in range(0, len(data), CHUNK_BYTES)]
    if "".join(found) != seal.chunks[first * DIGEST : (first + count) * DIGEST]:
        raise CorruptPart(number)
    return data


def read_part(folder: StoragePath, number: int, seal: PartManifest) -> Iterator[bytes]:
    """Read a whole part in blocks and check each of them; raise `CorruptPart`."""
    for first in range(0, len(seal.chunks) // DIGEST, CHUNKS_AT_ONCE):
        yield read_chunks(folder, number, seal, first, CHUNKS_AT_ONCE)


def discard(folder: StoragePath, number: int) -> None:
    """Forgets a part, so that it is encoded anew: the seal goes first."""
    for name in (seal_name(number), part_name(number)):
        (folder / name).unlink(missing_ok=True)


def json_sha256(value) -> str:
    """A hash of a JSON value that does not depend on the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
