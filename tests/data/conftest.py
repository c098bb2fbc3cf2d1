"""Small stores and files that the tests of the data layer share."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from gregale.data import store as storing
from gregale.data.build import NamedSource, TokenCache, build_store
from gregale.data.examples import DocumentStream, Windows
from gregale.data.sources import Skipped, SourceRange
from gregale.data.store import (
    LENGTH,
    ChunkCache,
    LossMask,
    PartManifest,
    TokenStore,
    complete_store,
    open_store,
    part_name,
    silent,
    write_part_manifest,
)
from gregale.data.tokenizers import NONE, ByteCountOverrides, BytesTokenizer

END = 9


def store_of(folder: Path, *parts: list[list[int]]) -> TokenStore:
    """A store of documents [part][document][token] as they are, without ends of their own."""
    folder.mkdir()
    seals = []
    for number, documents in enumerate(parts):
        lengths = [len(each) for each in documents]
        tokens = np.array([token for each in documents for token in each], "<u2")
        content = tokens.tobytes() + np.array(lengths, LENGTH).tobytes()
        (folder / part_name(number)).write_bytes(content)
        chunks = [content[at : at + storing.CHUNK_BYTES] for at in range(0, len(content), storing.CHUNK_BYTES)]
        digests = "".join(sha256(chunk).hexdigest() for chunk in chunks)
        seals.append(PartManifest(len(documents), len(tokens), 2, {}, digests))
        write_part_manifest(folder, number, seals[-1])
    complete_store(folder, seals, {"dtype": "uint16", "tokenizer": "none", "source": {}})
    return open_store(folder, ChunkCache(folder / "pieces", 0))


@dataclass(frozen=True)
class InMemory:
    """What a stream needs of a store."""

    tokens: np.ndarray
    offsets: np.ndarray
    corrections: ByteCountOverrides = NONE
    supervised: LossMask | None = None


def in_memory(documents: Sequence[Sequence[int]]) -> InMemory:
    """Documents [document][token] as they are, without ends of their own."""
    tokens = np.array([token for each in documents for token in each], np.uint16)
    return InMemory(tokens, np.array([0, *map(len, documents)]).cumsum())


def build(source, cache: Path, report=silent, workers: int = 1, disk: ChunkCache | None = None) -> TokenStore:
    """Build the store of a source in bytes."""
    disk = disk or ChunkCache(cache / "pieces", 10**9)
    return build_store(NamedSource("x", source), BytesTokenizer(), TokenCache(cache, disk), workers, report)


def read(source, parts: Sequence[SourceRange] | None = None) -> tuple[list, Skipped]:
    """The contents of the documents in parts of a source, in all without any given; and what was skipped."""
    skipped = Skipped()
    return [one.content for part in parts or source.parts() for one in source.read(part, skipped)], skipped


def cut(path: Path, size: int, cuts: Sequence[int]) -> list[SourceRange]:
    """The parts of a file of `size` between those of the cuts that lie within it."""
    edges = [0, *sorted({cut for cut in cuts if cut < size}), size]
    return [SourceRange(str(path), a, b, b - a) for a, b in pairwise(edges)]


def stream_of(store) -> DocumentStream:
    """Return a stream of all documents of a store."""
    return DocumentStream(store, np.ones(len(store.offsets) - 1, bool))


def numbered(count: int, first: int, length: int = 4) -> Windows:
    """`count` windows of one document, window w beginning with token first + w."""
    tokens = [first + place // length for place in range(count * length)]
    return Windows(stream_of(in_memory([[*tokens, END]])), length, cross_documents=False)


@pytest.fixture
def make_store():
    """What a stream needs of a store of the given documents [document][token], each ended by END."""
    return lambda documents: in_memory([[*document, END] for document in documents])


@pytest.fixture
def contents():
    """The documents of a store or a source, as lists or texts."""

    def read(found):
        if hasattr(found, "offsets"):
            return [found.tokens[a:b].tolist() for a, b in pairwise(found.offsets)]
        return [one.content if isinstance(one.content, str) else one.content.tolist() for one in found.documents()]

    return read
