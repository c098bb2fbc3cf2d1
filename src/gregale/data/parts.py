"""The parts of a token store: one process encodes each part and then writes its manifest.

The parts of a source depend only on its files. So any process on any host may encode any part, and a later build
continues from the finished parts. A part is a file, `part-00000007.bin`: the ids of its documents, each ended by the
end-of-document token, then the documents' lengths in tokens (int64), all little-endian. Its manifest,
`part-00000007.json`, is written after it and contains a checksum of every chunk.

The worker processes import this module; it must never import JAX.
"""

import hashlib
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gregale.atomic_files import atomic_replace
from gregale.data.chat.conversation import Conversation, Pair
from gregale.data.chat.encoding import ChatEncoder, Encoded
from gregale.data.chat.renderer import NotRendered
from gregale.data.sources import Document, Skipped, SourceConfig, SourceRange
from gregale.data.sources.base import BadDocument
from gregale.data.special_names import counter_of_names
from gregale.data.supervised import Supervised
from gregale.data.text_bytes import Corrections
from gregale.data.tokenizers import Tokenizer
from gregale.errors import UserError
from gregale.storage import ObjectPath, StoragePath, names, read_range, write_bytes

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
    corrections: str | None = None  # packed `Corrections`; None if the tokenizer needs none
    special_names: dict[str, int] | None = None  # in the text and encoded as characters, each with its count
    supervised: str | None = None  # the changes of a packed `Supervised`; None if the loss is on all tokens
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
                    corrections.append(Corrections.of(more_bytes))
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
        corrections=None if tokenizer.is_exact else Corrections.joined(zip(lengths, corrections, strict=True)).packed(),
        special_names=dict(names) or None,
        supervised=Supervised.joined(masks).packed() if task.source.has_masks else None,
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
